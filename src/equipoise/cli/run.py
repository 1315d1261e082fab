"""``equipoise run SCRIPT ARGS``: watch a training script as it is."""

from pathlib import Path
from typing import Annotated

import typer

# Everything behind the script is the script's, even if it looks like an option of ours.
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script, unmodified.")],
    every: Annotated[
        int | None, typer.Option(help="Sample one step in this many (10).")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Where to write the run.")] = None,
) -> None:
    """Run a script and watch whatever it trains; options come before the script."""
    # Here, not above: --help must not load torch.
    from equipoise.integrations.launcher import launched

    # What is not given here may be given by EQUIPOISE_EVERY or equipoise.toml.
    given = {} if every is None else {"every": every}
    launched(script, context.args, report=_report, run=run, **given)


def _report(paths: list[Path]) -> None:
    if not paths:
        typer.echo("equipoise: the script trained nothing with a torch optimiser")
    for path in paths:
        typer.echo(f"equipoise: run written to {path}; see: equipoise report {path}")
