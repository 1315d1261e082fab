"""``equipoise preflight SCRIPT ARGS``: judge the start of a training script."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.arguments import Html, Json, put_json
from equipoise.cli.audit import audit_json, write_page
from equipoise.errors import InputError

# Everything behind the script is the script's, even if it looks like an option of ours.
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}

EXAMPLES = (
    "equipoise preflight train.py --lr 3e-4",
    "equipoise preflight --steps 40 train.py",
)


def command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script, unmodified.")],
    steps: Annotated[int, typer.Option(min=2, help="Optimiser steps to take.")] = 20,
    seconds: Annotated[
        float,
        typer.Option(min=0, help="End the script after so long; 0 is without end."),
    ] = 600.0,
    peak_lr: Annotated[
        float | None,
        typer.Option(help="The schedule's peak, where the loop itself computes it."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read curvature (slow).")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(
            help="Exit with 1 at this severity or above: warn, error or never."
        ),
    ] = "warn",
    html: Html = None,
    json: Json = None,
) -> None:
    """Run a script for a few steps and judge its start; options before the script."""
    if fail_on not in {"warn", "error", "never"}:
        raise InputError(f"--fail-on {fail_on}: give warn, error or never")
    # Here, not above: --help must not load torch.
    from equipoise.auditing.page import print_verdict
    from equipoise.auditing.preflight import preflight

    found = preflight(
        script,
        context.args,
        steps=steps,
        peak_lr=peak_lr,
        seconds=seconds,
        preset="deep" if deep else "default",
    )
    result = found.as_audit(script.name)
    printed = json is not None and put_json(audit_json(result, "preflight"), json)
    if not printed:
        print_verdict(found.verdict, facts=found.facts)
    write_page(result, html, quietly=printed)
    if fail_on == "never":
        return
    failed = found.verdict.state == "not judged"
    grave = any(finding.is_grave(fail_on) for finding in found.findings)
    raise typer.Exit(int(failed or grave))
