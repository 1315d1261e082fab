"""``equipoise remedy RUN``: what to try first against what a run's verdict says."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import opened_run
from equipoise.judging.causes import REMEDIES
from equipoise.judging.remedy_catalogue import (
    HALVED,
    RemedyEntry,
    offered,
    rescues,
)
from equipoise.judging.rules import load_rules
from equipoise.judging.verdict import Verdict
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
    offers = remedies_for(verdict)
    if json:
        rows = [{**asdict(entry), "page": entry.page} for entry, _ in offers]
        shown = {"state": verdict.state, "sentence": verdict.sentence}
        typer.echo(jsonlib.dumps({**shown, "remedies": rows}, ensure_ascii=False))
        return
    typer.echo(f"{verdict.state}: {verdict.sentence}")
    typer.echo(_advice(offers))


def remedies_for(verdict: Verdict) -> list[tuple[RemedyEntry, str]]:
    """Return what fits a verdict's findings and against which family of trouble.

    The first to try is in front: in the order of the findings, but what was measured
    against its family comes before what was not.
    """
    if verdict.state in ("healthy", "not judged"):
        return []
    grave = [finding for finding in verdict.findings if finding.severity != "info"]
    about = {name: rule.about for name, rule in load_rules().items()}
    # As in the verdict's sentence: a cause comes before what it does to the loss.
    ordered = sorted(grave, key=lambda finding: about.get(finding.code) == "loss")
    found: dict[str, tuple[RemedyEntry, str]] = {}
    for names, family in map(_of, ordered):
        for entry in offered(names, family):
            found.setdefault(entry.name, (entry, family))
    return sorted(found.values(), key=lambda pair: pair[0].best(pair[1]) is None)


def _of(finding: Finding) -> tuple[tuple[str, ...], str]:
    """Return the remedies that fit a finding, and the family of its trouble."""
    if finding.code.startswith("nonfinite"):
        return NONFINITE, ""
    if finding.code == "forecast.failure":
        cause = str(finding.params.get("cause"))
        return REMEDIES.get(cause, ()), cause
    rule = load_rules().get(finding.code)
    return (rule.remedies, rule.storms) if rule is not None else ((), "")


def _advice(offers: list[tuple[RemedyEntry, str]]) -> str:
    if not offers:
        return "nothing to apply; equipoise remedies lists what there is"
    (first, family), *others = offers
    lines = [
        f"try first: {first.name}: {first.does} ({first.page})",
        "",
        *(f"    {line}" for line in first.code.splitlines()),
    ]
    if (cell := first.best(family)) is not None:
        half = rescues().get(HALVED, {}).get(family)
        beside = "" if half is None else f"; half the rate from the start: {half}"
        lines += ["", f"failing runs of this kind that it rescued: {cell}{beside}"]
    if others:
        rest = "; ".join(f"{entry.name}: {entry.does}" for entry, _ in others)
        lines += ["", f"if that does not help: {rest}"]
    return "\n".join(lines)
