"""``equipoise run SCRIPT ARGS``: watch a training script as it is."""

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.arguments import with_options

# Everything behind the script is the script's, even if it looks like an option of ours.
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}

EXAMPLES = (
    "equipoise run train.py --lr 3e-4",
    "equipoise run --every 20 --name baseline train.py --lr 3e-4",
    "equipoise run --budget 0.02 --sink tensorboard train.py",
)
OPTIONS = {
    "preset": (str, "minimal, default or deep: what is measured."),
    "every": (int, "Sample one step in this many (10)."),
    "budget": (float, "Largest share of time for sampling, such as 0.02."),
}


@with_options(OPTIONS, before="sink")
def command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script, unmodified.")],
    *,
    run: Annotated[Path | None, typer.Option(help="The run file to write.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the run is called."),
    ] = None,
    sink: Annotated[
        list[str] | None,
        typer.Option(help="jsonl, tensorboard, wandb or mlflow; may be repeated."),
    ] = None,
    **given: Any,
) -> None:
    """Run a script and watch whatever it trains; options come before the script."""
    # Here, not above: --help must not load torch.
    from equipoise.integrations.launcher import launched

    # What is not given here may be given by EQUIPOISE_EVERY or equipoise.toml.
    if sink:
        given["sinks"] = tuple(sink)
    launched(script, context.args, report=_report, run=run, name=name, **given)


def _report(paths: list[Path]) -> None:
    """Each run has printed its own line, where it closed."""
    if not paths:
        nothing = "equipoise: the script trained nothing with a torch optimiser"
        typer.echo(nothing, err=True)
