"""The quick lane leaves out what its list names, and the list names what exists."""

from pathlib import Path

import pytest

from tests import quick_lane
from tests.coverage_table import by_package, package, table
from tests.quick_lane import QuickLane

LANE = QuickLane(["zoo/test_a.py", "test_b.py"], {"test_c.py": ["test_slow"]})


def test_every_entry_names_one_file_and_tests_it_has() -> None:
    assert [*quick_lane.read().stale(quick_lane.files())] == []


def test_an_entry_is_the_end_of_a_path() -> None:
    assert LANE.leaves_out_file(Path("/x/tests/zoo/test_a.py"))
    assert LANE.leaves_out_file(Path("/x/lab/tests/test_b.py"))
    assert not LANE.leaves_out_file(Path("/x/tests/test_a.py"))
    assert not LANE.leaves_out_file(Path("/x/tests/late_test_b.py"))


def test_a_test_is_left_out_with_all_its_parameters() -> None:
    path = Path("/x/tests/test_c.py")
    assert LANE.leaves_out_test(path, "test_slow[float32-3]")
    assert not LANE.leaves_out_test(path, "test_slower")
    assert not LANE.leaves_out_test(Path("/x/tests/test_d.py"), "test_slow")


@pytest.mark.parametrize(
    "entries, found",
    [
        (QuickLane(["test_gone.py"], {}), "test_gone.py: 0 files end so"),
        (QuickLane(["test_a.py"], {}), "test_a.py: 2 files end so"),
        (QuickLane([], {"zoo/test_a.py": ["test_g"]}), "zoo/test_a.py: no test test_g"),
    ],
)
def test_an_entry_that_names_nothing_or_two_is_stale(
    entries: QuickLane, found: str, tmp_path: Path
) -> None:
    paths = [tmp_path / "zoo" / "test_a.py", tmp_path / "lab" / "test_a.py"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("def test_f(): ...\n")
    assert [*entries.stale(paths)] == [found]
    assert [
        *QuickLane(["lab/test_a.py"], {"zoo/test_a.py": ["test_f"]}).stale(paths)
    ] == []


def test_coverage_is_added_up_by_package() -> None:
    def measured(*numbers: int) -> dict[str, dict[str, int]]:
        names = "num_statements", "covered_lines", "num_branches", "covered_branches"
        return {"summary": dict(zip(names, numbers, strict=True))}

    found = by_package(
        {
            "src/equipoise/store/a.py": measured(10, 10, 4, 1),
            "src/equipoise/store/deep/b.py": measured(30, 10, 0, 0),
            "lab/src/equipoise_lab/c.py": measured(1, 0, 0, 0),
        }
    )
    assert [*table(found)][2:] == [
        "| equipoise_lab.c | 1 | 0.0 % | 0 | none |",
        "| equipoise.store | 40 | 50.0 % | 4 | 25.0 % |",
        "| all | 41 | 48.8 % | 4 | 25.0 % |",
    ]
    assert package("equipoise/errors.py") == "equipoise.errors"
