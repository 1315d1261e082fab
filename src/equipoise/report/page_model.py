"""The view-model of a run: what its page shows, as JSON values.

Report and board draw the same page from it. The report carries all of it inside; the
board asks for one part at a time.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from equipoise.judging.card import Card
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding
from equipoise.report.changes import Change, seen_at
from equipoise.report.grids import blocks_of, layer_of
from equipoise.report.quantities import MOST, quantity_of, shown
from equipoise.store import Run

Json = dict[str, Any]
EVENTS = 200
"""Findings and remedies on a page; the run file keeps them all."""
DEPTH = ("gradient.vanish", "gradient.explo", "vanish")
"""Rules that one sees best from the first layer to the last."""


def run_json(run: Run, *, label: str, key: str) -> Json:
    """Return what a run is, what it holds, and what happened in it."""
    steps = run.steps
    blocks = blocks_of(run)
    return {
        "key": key,
        "label": label,
        "file": run.path.name,
        "created": run.info.created,
        "version": run.info.version,
        "details": {str(k): brief(v) for k, v in run.info.details.items()},
        "card": card_json(run.card),
        "layers": len(blocks),
        "steps": _span(steps),
        "quantities": [_quantity(name) for name in run.quantities],
        **events_json(run),
    }


def card_json(card: Card) -> Json:
    """Return a card: its lines, and the facts they are made of."""
    plain: Json = json.loads(card.to_json())
    lines = [[title, list(own)] for title, own in card.text.items()]
    return {**plain, "text": lines, "unseen": card.unseen}


def _span(steps: Any) -> Json:
    if not len(steps):
        return {"first": None, "last": None, "count": 0}
    return {"first": int(steps[0]), "last": int(steps[-1]), "count": len(steps)}


def _quantity(name: str) -> Json:
    return asdict(shown(name))


def events_json(run: Run) -> Json:
    """Return findings and remedies by step, and how many are not listed."""
    grave = sorted(run.findings, key=lambda finding: finding.order)
    findings = [event_json("finding", finding) for finding in grave]
    remedies = [event_json("remedy", applied) for applied in run.applied]
    listed = sorted([*findings[:EVENTS], *remedies[:EVENTS]], key=lambda e: e["step"])
    return {"events": listed, "unlisted": len(findings) + len(remedies) - len(listed)}


def event_json(kind: str, record: Any) -> Json:
    """Return a finding, or a remedy that was applied, as one event of a page."""
    found: Json = json.loads(record.to_json())
    if kind == "remedy":
        word = "taken back" if record.undone else "applied"
        found |= {
            "severity": "info",
            "message": f"{record.remedy} {word}",
            "code": record.remedy,
            "params": found["details"],
            "advice": "",
        }
    return {"kind": kind, **found}


def verdict_json(run: Run, verdict: Verdict) -> Json:
    """Return a verdict and the chart in which one sees it."""
    record: Json = json.loads(verdict.to_json())
    record["findings"] = [event_json("finding", f) for f in verdict.findings]
    chart = chart_json(run, verdict)
    begun = [verdict.since, chart["step"] if chart else None]
    told = (verdict.lead, *verdict.effects)
    return {
        **record,
        "began": min((step for step in begun if step is not None), default=None),
        "read": max((one.step for one in told if one is not None), default=None),
        "chart": chart,
        "basis": basis(run),
    }


def chart_json(run: Run, verdict: Verdict) -> Json | None:
    """Return which quantity shows what is wrong, where, and from which step on."""
    stored = sorted(run.quantities, key=lambda name: shown(name).rank)
    cause = verdict.lead
    if cause is None:
        name = "loss" if "loss" in stored else next(iter(stored), None)
        return None if name is None else _chart(name, "", None, "curve")
    quantity = quantity_of(cause, stored)
    if quantity is None:
        return None
    view = "depth" if cause.code.startswith(DEPTH) else "curve"
    seen, blocks = verdict.seen or seen_at(cause), blocks_of(run)
    at_fault = verdict.where if verdict.where is not None else cause.site
    site = at_fault or seen
    return _chart(quantity, site, cause.since, view) | {
        "layer": layer_of(site, blocks) if site else None,
        "seen": seen,
        "seen_layer": layer_of(seen, blocks) if seen else None,
        # A setting is none of one layer, whichever layer shows it first.
        "everywhere": not at_fault or bool(verdict.cause),
        "limit": _limit(run, quantity, cause),
    }


def _limit(run: Run, quantity: str, cause: Finding) -> float | None:
    """Return a rule's threshold where it is one of the quantity itself.

    Not of loads: half of the experts is not half of the load.
    """
    value, limit = cause.params.get("value"), cause.params.get("threshold")
    if (
        quantity in MOST
        or not isinstance(value, float)
        or not isinstance(limit, float | int)
    ):
        return None
    read = (v for row in run.near(quantity, cause.step).values for v in row)
    same = any(math.isclose(value, v, rel_tol=1e-3) for v in read)
    return float(limit) if same else None


def _chart(quantity: str, site: str, step: int | None, view: str) -> Json:
    return {
        "quantity": quantity,
        "site": site,
        "step": step,
        "view": view,
        "layer": None,
        "seen": site,
        "seen_layer": None,
        "everywhere": False,
        "limit": None,
    }


def changes_json(found: Sequence[Change], blocks: Sequence[str]) -> list[Json]:
    """Return the table of changes; ``broken`` marks what is not finite."""
    return [
        {
            "quantity": change.quantity,
            "title": shown(change.quantity).title,
            "site": change.site,
            "layer": layer_of(change.site, blocks),
            "step": change.step,
            "before": finite(change.before),
            "after": finite(change.after),
            "strength": finite(change.strength),
            "broken": change.broken,
            "kind": change.kind,
        }
        for change in found
    ]


def finite(value: float) -> float | None:
    """Return six digits of a number; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def brief(value: Any) -> str:
    """Return a detail of a run in one line.

    >>> brief(["h.0", "h.1", "h.2", "h.3"])
    'h.0, h.1, … h.3 (4)'
    """
    if isinstance(value, list) and len(value) > 3:
        return f"{value[0]}, {value[1]}, … {value[-1]} ({len(value)})"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    plain = f"{value:,}" if isinstance(value, int) else str(value)
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}…"


def shown_name(run: Run) -> str:
    """Return a run's name, cut where it would fill a page."""
    name = run.info.name
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


LONGEST_NAME = 160
"""Characters of a run's name on a page: a folder's longest name is 255."""
LONGEST = 2000
"""Characters of a detail on a page."""


READ_BYTES = 64 * 2**20
"""A larger file is skimmed for a verdict, not read through."""


def judged(run: Run) -> Verdict:
    """Return what is the matter with a run, in a time that a page can wait."""
    if is_large(run):
        run.skim()
    return run.verdict


def is_large(run: Run) -> bool:
    """Say whether a file is skimmed; one that is gone meanwhile is not."""
    try:
        return run.path.stat().st_size > READ_BYTES
    except OSError:
        return False


def basis(run: Run) -> str:
    """Return what a verdict rests on where that is not every reading."""
    found = run.skimmed
    if found is None or found.steps == found.of:
        return ""
    return (
        f"Judged at {found.steps:,} of {found.of:,} sampled steps, spread over the run;"
        f" equipoise report {run.path.name} reads them all."
    )
