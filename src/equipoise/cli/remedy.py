"""``equipoise remedy RUN``: what to try first against what a run's verdict says."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import opened_run
from equipoise.forecast.causes import REMEDIES
from equipoise.forecast.remedy_catalogue import (
    CATALOGUE,
    HALVED,
    RemedyEntry,
    rescues,
)
from equipoise.forecast.rules import load_rules
from equipoise.forecast.verdict import Verdict
from equipoise.records import Finding

EXAMPLES = ("equipoise remedy", "equipoise remedy runs/mine.eqp --json")
NONFINITE = ("roll_back", "learning_rate", "skip_step")
"""After numbers that are not finite, whatever the rules say: there is no way on."""


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run file, or a folder whose newest run is taken; $EQUIPOISE_RUNS "
            "or ./runs unless given.",
            show_default=False,
        ),
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Name the remedy to try first for a run's verdict, with the code for it."""
    verdict = opened_run(run).verdict
    cause = _cause(verdict)
    entries = [CATALOGUE[name].against(cause) for name in remedies_for(verdict)]
    if json:
        rows = [{**asdict(entry), "page": entry.page} for entry in entries]
        shown = {"state": verdict.state, "sentence": verdict.sentence}
        typer.echo(jsonlib.dumps({**shown, "remedies": rows}, ensure_ascii=False))
        return
    typer.echo(f"{verdict.state}: {verdict.sentence}")
    typer.echo(_advice(entries, cause))


def _cause(verdict: Verdict) -> str:
    """Return the family of trouble that the forecast names; "" if it names none."""
    found = (f for f in verdict.findings if f.rule == "forecast.failure")
    return next((str(f.evidence.get("cause", "")) for f in found), "")


def remedies_for(verdict: Verdict) -> list[str]:
    """Return the remedies that fit a verdict's findings, the first to try in front."""
    if verdict.state in ("healthy", "not judged"):
        return []
    grave = [finding for finding in verdict.findings if finding.severity != "info"]
    about = {name: rule.about for name, rule in load_rules().items()}
    # As in the verdict's sentence: a cause comes before what it does to the loss.
    ordered = sorted(grave, key=lambda finding: about.get(finding.rule) == "loss")
    names = [name for finding in ordered for name in _of(finding)]
    return list(dict.fromkeys(names))


def _of(finding: Finding) -> tuple[str, ...]:
    if finding.rule.startswith("nonfinite"):
        return NONFINITE
    if finding.rule == "forecast.failure":
        return REMEDIES.get(str(finding.evidence.get("cause")), ())
    rule = load_rules().get(finding.rule)
    return rule.remedies if rule is not None else ()


def _advice(entries: list[RemedyEntry], cause: str) -> str:
    if not entries:
        return "nothing to apply; equipoise remedies lists what there is"
    first, *others = entries
    lines = [
        f"try first: {first.name}: {first.does} ({first.page})",
        "",
        *(f"    {line}" for line in first.code.splitlines()),
    ]
    if (cell := first.best(cause)) is not None:
        half = rescues().get(HALVED, {}).get(cause)
        beside = "" if half is None else f"; half the rate from the start: {half}"
        lines += ["", f"failing runs of this kind that it rescued: {cell}{beside}"]
    if others:
        rest = "; ".join(f"{entry.name}: {entry.does}" for entry in others)
        lines += ["", f"if that does not help: {rest}"]
    return "\n".join(lines)
