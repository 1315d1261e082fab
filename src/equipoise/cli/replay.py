"""``equipoise replay``: repeat a recorded step, and see where it first goes wrong."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.arguments import Json, as_json, put_json
from equipoise.cli.progress import working
from equipoise.errors import InputError, RunFileError

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = (
    "equipoise replay runs/mine.eqp --model train:build",
    "equipoise replay runs/mine.eqp --model train:build --step 1200 --json",
)


def command(
    run: Annotated[Path, typer.Argument(help="The run file the step belongs to.")],
    model: Annotated[
        str, typer.Option(help="package.module:function that returns the model.")
    ],
    step: Annotated[
        int | None, typer.Option(help="The step; the last one saved by default.")
    ] = None,
    *,
    json: Json = None,
) -> None:
    """Repeat a step of a run with every probe on.

    Needs what ``watch(..., hold_batch=True)`` saves when a loss turns non-finite: the
    batch, the random state and the weights; and your function that builds the model.
    """
    # Here, not above: --help must not load torch.
    from equipoise.cli.subject import user_code
    from equipoise.text.render import render
    from equipoise.watching.options import preset_probes
    from equipoise.watching.step.batch import NEEDED, bundles, load_step, measure
    from equipoise.watching.step.nonfinite import first_bad_module, origin_finding

    saved = bundles(run)
    if not saved:
        raise RunFileError(f"{run}: no step of it was saved; {NEEDED}")
    if step is not None and step not in saved:
        raise RunFileError(f"{run}: step {step} was not saved; there are {list(saved)}")
    chosen = max(saved) if step is None else step
    with working(f"repeating step {chosen}"):
        network = built(model)
        batch = load_step(saved[chosen], network)
        with user_code(f"{saved[chosen]} does not run on --model {model}"):
            origin = first_bad_module(network, batch)
            table = measure(network, batch, preset_probes("minimal"))
    summary = "every output is finite"
    if origin is not None:
        summary = render(origin_finding(chosen, origin, rank=0)).message
    result = {"run": run, "step": chosen, "summary": summary, "readings": table}
    if json and put_json(as_json(result), json):
        return
    typer.echo(f"step {chosen} of {run}: {summary}")
    for quantity, sites in table.items():
        for site, cell in sites.items():
            numbers = " ".join(f"{value:.4g}" for value in cell.values)
            typer.echo(f"  {quantity:28} {site or 'model':32} {numbers}")


def built(where: str) -> "nn.Module":
    """Return the model that ``package.module:function`` makes."""
    from torch import nn

    from equipoise.cli.subject import user_code

    name, _, function = where.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: the user's module is usually here
    try:
        with user_code(f"--model {where} (it is module:function)"):
            made = getattr(import_module(name), function)()
    finally:
        sys.path.remove("")
    if not isinstance(made, nn.Module):
        raise InputError(
            f"--model {where}: returned {type(made).__name__}, not a model"
        )
    return made
