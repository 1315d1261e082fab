"""``equipoise storms``: labels of the benchmark's runs, and scores of forecasters."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from equipoise.cli import epilog
from equipoise.cli.arguments import Json, print_json
from equipoise.cli.progress import working

if TYPE_CHECKING:
    from equipoise_lab.storms.scoring import Score

HELP = "Score a forecaster on recorded runs that failed, and on stable ones."
EXAMPLES = ("equipoise storms labels", "equipoise storms score --help")

app = typer.Typer(no_args_is_help=True, add_completion=False)

Runs = Annotated[
    Path | None,
    typer.Option(help="Where the runs are; storms in the lab's folder unless given."),
]


@app.command("labels", epilog=epilog("equipoise storms labels --runs lab-runs/storms"))
def show_labels(*, runs: Runs = None, json: Json = False) -> None:
    """Count what failed and what survived, family by family."""
    # Here, not above: --help must not load torch.
    from equipoise_lab.storms.labels import counts, labels
    from equipoise_lab.storms.tables import label_table

    found = labels(_place(runs))
    if json:
        print_json(counts(found))
    else:
        Console().print(label_table(found))


@app.command(
    epilog=epilog(
        "equipoise storms score",
        "equipoise storms score mine:forecaster --split family",
    )
)
def score(
    forecaster: Annotated[
        str, typer.Argument(help="module:function, or `baselines`.")
    ] = "baselines",
    *,
    runs: Runs = None,
    split: Annotated[
        str, typer.Option(help="Tune on other seeds, or other families: seed, family.")
    ] = "seed",
    json: Json = False,
) -> None:
    """Score a forecaster: recall, false alarms per 10,000 stable steps, lead."""
    from equipoise_lab.options import one_of
    from equipoise_lab.storms.baselines import BASELINES
    from equipoise_lab.storms.labels import labels
    from equipoise_lab.storms.scoring import loaded, score_all
    from equipoise_lab.storms.tables import score_table

    one_of("--split", split, ("seed", "family"))
    by: Literal["seed", "family"] = "family" if split == "family" else "seed"
    makers = (
        BASELINES if forecaster == "baselines" else {forecaster: loaded(forecaster)}
    )
    found = labels(_place(runs))
    with working("scoring", total=None):
        scores = score_all(makers, found, split=by)
    if json:
        print_json({name: _numbers(score) for name, score in scores.items()})
    else:
        Console().print(score_table(scores))


def _numbers(score: "Score") -> dict[str, object]:
    return {
        "recall": score.recall,
        "recall_interval": score.recall_interval(),
        "false_alarms": score.false_alarms,
        "per_10000": score.rate,
        "per_10000_at_most": score.rate_bound,
        "stable_steps": score.stable_steps,
    }


def _place(runs: Path | None) -> Path:
    from equipoise_lab.running.runner import lab_directory

    return runs or lab_directory() / "storms"
