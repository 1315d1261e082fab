"""``equipoise storms``: labels of the benchmark's runs, and scores of forecasters."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from equipoise.cli import epilog
from equipoise.cli.arguments import Json, as_json, put_json
from equipoise.cli.progress import working

if TYPE_CHECKING:
    from equipoise_lab.storms.field.bars import Counts
    from equipoise_lab.storms.scoring import Score

HELP = "Score rules and forecasters on runs that failed, and on healthy ones."
EXAMPLES = (
    "equipoise storms --tier field",
    "equipoise storms labels",
    "equipoise storms score --help",
)

app = typer.Typer(add_completion=False)

Runs = Annotated[
    Path | None,
    typer.Option(help="Where the runs are; storms in the lab's folder unless given."),
]


Records = Annotated[
    Path | None,
    typer.Option(help="Where recorded units are; lab/field of a checkout by default."),
]


@app.callback(invoke_without_command=True)
def tier(
    context: typer.Context,
    *,
    tier: Annotated[
        str, typer.Option(help="field: make what is missing of it, and judge all.")
    ] = "",
    records: Records = None,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Train nothing.")
    ] = False,
    json: Json = None,
) -> None:
    """Judge rules on the field, or score a forecaster on storms."""
    if context.invoked_subcommand is not None:
        return
    if not tier:
        typer.echo(context.get_help())
        raise typer.Exit(0)
    # Here, not above: --help must not load torch.
    from equipoise_lab.options import one_of
    from equipoise_lab.storms.field.bars import counts
    from equipoise_lab.storms.field.judged import judge_all
    from equipoise_lab.storms.field.making import make
    from equipoise_lab.storms.field.manifest import units

    one_of("--tier", tier, ("field",))
    part, folder = units("open"), _records(records)
    if not judge_only:
        make(part, folder, lambda line: typer.echo(line, err=True))
    with working("judging", total=None):
        found = counts(judge_all(part, folder))
    _show_field(found, json=json)


@app.command("open-locked", epilog=epilog("equipoise storms open-locked"))
def open_locked(
    *,
    records: Records = None,
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Judge what was made before; make nothing."),
    ] = False,
    json: Json = None,
) -> None:
    """Judge the field's locked part: once, written to a log, refused ever after."""
    from equipoise_lab.storms.field.lock import open_once
    from equipoise_lab.storms.field.manifest import units

    folder = _records(records)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    found = open_once(
        units("locked"),
        folder,
        lambda line: typer.echo(line, err=True),
        commit.strip() or "not a checkout",
        recorded=recorded,
    )
    _show_field(found, json=json)


def _show_field(found: "Counts", *, json: Path | None) -> None:
    from equipoise_lab.storms.field import tables

    if json is None or not put_json(as_json(tables.as_json(found)), json):
        Console().print(tables.field_tables(found))


def _records(given: Path | None) -> Path:
    """Return where recorded units are: lab/field of a checkout."""
    from equipoise_lab.running.runner import lab_directory

    beside = Path(__file__).parents[3] / "field"
    return given or (
        beside if beside.parent.name == "lab" else lab_directory() / "field"
    )


@app.command("labels", epilog=epilog("equipoise storms labels --runs lab-runs/storms"))
def show_labels(*, runs: Runs = None, json: Json = None) -> None:
    """Count what failed and what survived, family by family."""
    # Here, not above: --help must not load torch.
    from equipoise_lab.storms.labels import counts, labels
    from equipoise_lab.storms.tables import label_table

    found = labels(_place(runs))
    if json is None or not put_json(as_json(counts(found)), json):
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
    json: Json = None,
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
    result = as_json({name: _numbers(score) for name, score in scores.items()})
    if json is None or not put_json(result, json):
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
