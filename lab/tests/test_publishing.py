"""Published pages follow from the raw numbers beside them, to the letter."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from equipoise.errors import InputError
from equipoise_lab.models import GPTConfig
from equipoise_lab.results import publishing
from equipoise_lab.results.evidence import Evidence, gather, rounded
from equipoise_lab.results.figures import Figure, FigureLine, axis, svg
from equipoise_lab.results.finding import over_depth
from equipoise_lab.running.execution import execute
from equipoise_lab.running.experiment import Arm, Experiment, short_hash
from equipoise_lab.studies.catalogue import (
    FRAGILITY,
    RECIPES,
    REPORTS,
    finding,
    measurements_of,
    recipe,
)
from equipoise_lab.studies.selection.paper import NAME as PAPER
from equipoise_lab.training.options import TrainOptions

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LARGEST = 200_000


@pytest.mark.parametrize(
    "folder", sorted(RESULTS.glob("*/")), ids=lambda folder: folder.name
)
def test_committed_pages_follow_from_their_numbers(folder: Path) -> None:
    raw = folder / publishing.RAW
    evidence = Evidence.from_json(raw.read_text(encoding="utf-8"))
    files = publishing.page_files(evidence)
    for name, text in files.items():
        assert (folder / name).read_text(encoding="utf-8") == text, name
    # A measurement may leave pictures of its own; all else is made from the numbers.
    present = {path.name for path in folder.iterdir() if path.suffix != ".png"}
    assert present == {publishing.RAW, *files}
    assert all((folder / name).stat().st_size < LARGEST for name in present)
    assert evidence.to_json() == raw.read_text(encoding="utf-8")


def test_the_committed_index_lists_them() -> None:
    found = publishing.published(RESULTS)
    text = (RESULTS / publishing.PAGE).read_text(encoding="utf-8")
    assert text == publishing.listing(found, publishing.actions(RESULTS))
    assert set(REPORTS) <= set(RECIPES)
    # The index says that one command makes them all again.
    assert set(found) == {*REPORTS, "theorem", FRAGILITY, PAPER}


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_of_the_runs_that_its_command_makes(name: str) -> None:
    """Else the command on the page would not give the page's numbers."""
    page, experiment = publishing.published(RESULTS)[name], recipe(name)
    assert page.seeds == experiment.seeds
    assert set(page.arms) == {arm.name for arm in experiment.arms}
    assert page.measures == experiment.measures


def test_what_to_do_was_written_for_the_committed_findings() -> None:
    """A finding that changes asks for its sentence to be read again."""
    given = json.loads((RESULTS / publishing.ACTIONS).read_text(encoding="utf-8"))
    found = publishing.published(RESULTS)
    assert set(given) == set(found)
    for name, evidence in found.items():
        verdict = finding(evidence).verdict
        assert given[name]["finding"] == short_hash(verdict), name


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    root = tmp_path_factory.mktemp("lab")
    train = TrainOptions(
        steps=12, batch=2, warmup=2, every=4, parts_every=4, preset="minimal"
    )
    shape = GPTConfig(width=8, depth=2, heads=1, context=16)
    experiment = Experiment(
        name="small",
        question="Does | it work?",
        arms=(
            Arm(name="a", model=shape, train=train, judges=("positions",)),
            Arm(name="b", model=shape, train=TrainOptions(steps=2, warmup=0)),
        ),
        seeds=(1, 2),
        curves=("loss", "gradient.norm", "gradient/qk", "queries/theta", "nothing"),
    )
    for task in experiment.tasks:
        if task.arm.name == "a":
            execute(task, root, measurements=measurements_of([task]))
    return experiment, root


def test_a_page_is_written_and_the_same_again(
    lab: tuple[Experiment, Path], tmp_path: Path
) -> None:
    experiment, root = lab
    evidence = gather(experiment, root)
    assert set(evidence.curves) == set(experiment.curves) - {"nothing"}
    assert set(evidence.runs) == {"a"} and evidence.runs["a"].keys() == {1, 2}
    assert len(evidence.curves["gradient.norm"]["a"]["end"]) == 2
    assert evidence.curves["queries/theta"]["a"]["x"] == list(range(16))
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "stale.svg").write_text("from an earlier figure")
    page = publishing.publish(evidence, folder)
    assert not (folder / "stale.svg").exists()
    text = page.read_text()
    assert text.startswith("# Does | it work?") and "Python " in text
    assert "`equipoise lab run small`" in text and "seeds 1, 2" in text
    for figure in folder.glob("*.svg"):
        ElementTree.parse(figure)
    test_committed_pages_follow_from_their_numbers(folder)
    publishing.index(tmp_path)
    assert "small/README.md" in (tmp_path / "README.md").read_text()


def test_figures_of_the_first_seed_are_saved(
    lab: tuple[Experiment, Path], tmp_path: Path
) -> None:
    experiment = lab[0]
    for task in experiment.tasks[:3]:  # a 1, a 2, b 1 in some order
        place = tmp_path / "runs" / task.folder
        place.mkdir(parents=True)
        (place / "entries.png").write_text(f"{task.arm.name} {task.seed}")
    publishing.keep_pictures(experiment, tmp_path / "runs", tmp_path)
    for picture in tmp_path.glob("*.png"):
        assert picture.stem == f"entries-{picture.read_text()[0]}"
        assert picture.read_text().endswith(" 1")
    assert (tmp_path / "entries-a.png").exists()


def test_nothing_finished_is_one_line(
    lab: tuple[Experiment, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="small has no finished run"):
        gather(lab[0], tmp_path)


def test_depth_figures_have_first_and_last(lab: tuple[Experiment, Path]) -> None:
    figure = over_depth(gather(*lab), "gradient.norm", title="g", log=True)
    assert [line.name for line in figure.lines] == ["a, end", "a, init"]
    assert list(figure.lines[0].x) == [1, 2]


def drawn(*values: float, log: bool = False) -> str:
    line = FigureLine(name="a<b", x=range(len(values)), y=values)
    return svg(Figure(name="f", title="t", x="x", y="y", lines=[line], log_y=log))


def test_gaps_lift_the_pen() -> None:
    assert drawn(1.0, 2.0, 3.0).count("L") == 2
    broken = drawn(1.0, math.nan, 2.0, 3.0)
    assert "nan" not in broken and broken.count("L") == 1
    assert drawn(1.0, 0.0, 2.0, log=True).count("L") == 0
    assert "a&lt;b" in broken
    ElementTree.fromstring(drawn())  # no point at all is an empty chart
    ElementTree.fromstring(drawn(2.0, 2.0))


def test_axes_hold_their_values_and_have_few_ticks() -> None:
    for values in ([0.0, 1.0], [1e-9, 2e-9], [5.0], [-3.0, 4e6]):
        found = axis(values, start=0, end=100, log=False)
        assert all(0 <= found(v) <= 100 for v in values)
        assert 2 <= len(found.ticks) <= 9
    wide = axis([1e-12, 1e9], start=100, end=0, log=True)
    assert 3 <= len(wide.ticks) <= 9
    assert all(math.log10(t) == round(math.log10(t)) for t in wide.ticks)


def test_numbers_are_kept_with_four_digits() -> None:
    assert rounded({"a": [1.23456, 7], "b": math.inf}) == {
        "a": [1.235, 7],
        "b": math.inf,
    }
