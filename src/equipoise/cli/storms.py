"""``equipoise storms``: labels of the benchmark's runs, and scores of forecasters."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False)

Runs = Annotated[
    Path | None,
    typer.Option(help="Where the runs are; storms in the lab's folder unless given."),
]


@app.command("labels")
def show_labels(*, runs: Runs = None) -> None:
    """Count what failed and what survived, family by family."""
    # Here, not above: --help must not load torch.
    from equipoise.lab.storms.labels import labels
    from equipoise.lab.storms.tables import label_table

    Console().print(label_table(labels(_place(runs))))


@app.command()
def score(
    forecaster: Annotated[
        str, typer.Argument(help="module:function, or `baselines`.")
    ] = "baselines",
    *,
    runs: Runs = None,
    split: Annotated[
        str, typer.Option(help="Tune on other seeds, or other families: seed, family.")
    ] = "seed",
) -> None:
    """Score a forecaster: recall, false alarms per 10,000 stable steps, lead."""
    from equipoise.lab.options import one_of
    from equipoise.lab.storms.baselines import BASELINES
    from equipoise.lab.storms.labels import labels
    from equipoise.lab.storms.scoring import loaded, score_all
    from equipoise.lab.storms.tables import score_table

    one_of("--split", split, ("seed", "family"))
    by: Literal["seed", "family"] = "family" if split == "family" else "seed"
    makers = (
        BASELINES if forecaster == "baselines" else {forecaster: loaded(forecaster)}
    )
    found = labels(_place(runs))
    Console().print(score_table(score_all(makers, found, split=by)))


def _place(runs: Path | None) -> Path:
    from equipoise.lab.running.runner import lab_directory

    return runs or lab_directory() / "storms"
