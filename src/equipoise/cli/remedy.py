"""``equipoise remedy RUN``: what to try first against what a run's verdict says."""

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import Json, opened_run, put_json
from equipoise.judging.remedy_catalogue import CATALOGUE, RemedyEntry
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
    json: Json = None,
) -> None:
    """Name the remedy to try first for a run's verdict, with the code for it."""
    verdict = opened_run(run).verdict
    offers = remedies_for(verdict)
    rows = [{**asdict(entry), "page": entry.page} for entry in offers]
    shown = {"state": verdict.state, "sentence": verdict.sentence, "remedies": rows}
    if json and put_json(jsonlib.dumps(shown, ensure_ascii=False), json):
        return
    typer.echo(f"{verdict.state}: {verdict.sentence}")
    typer.echo(_advice(offers))


def remedies_for(verdict: Verdict) -> list[RemedyEntry]:
    """Return the remedies of the rules that fire, the first to try in front.

    As in the verdict's sentence, a cause comes before what it does to the loss.
    """
    if verdict.state in ("healthy", "not judged"):
        return []
    grave = [finding for finding in verdict.findings if finding.severity != "info"]
    about = {name: rule.about for name, rule in load_rules().items()}
    ordered = sorted(grave, key=lambda finding: about.get(finding.code) == "loss")
    names = (name for finding in ordered for name in _remedies(finding))
    return [CATALOGUE[name] for name in dict.fromkeys(names)]


def _remedies(finding: Finding) -> tuple[str, ...]:
    if finding.belongs_to("nonfinite"):
        return NONFINITE
    rule = load_rules().get(finding.code)
    return rule.remedies if rule is not None else ()


def _advice(offers: list[RemedyEntry]) -> str:
    if not offers:
        return "nothing to apply; equipoise remedies lists what there is"
    first, *others = offers
    lines = [
        f"try first: {first.name}: {first.does} ({first.page})",
        "",
        *(f"    {line}" for line in first.code.splitlines()),
    ]
    if others:
        rest = "; ".join(f"{entry.name}: {entry.does}" for entry in others)
        lines += ["", f"if that does not help: {rest}"]
    return "\n".join(lines)
