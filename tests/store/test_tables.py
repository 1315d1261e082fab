"""A run as a table: what was written comes back from each library, and only that."""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from equipoise.errors import InputError, MissingExtraError
from equipoise.records import Reading, RunInfo
from equipoise.store import Run, RunWriter, open_run

INFO = RunInfo(name="mine", created="2026-11-17T20:00:00+00:00", version="0.1.0")
SITES = ("h.0", "h.1")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Six losses, one of them NaN; three readings of two heads at two sites."""
    with RunWriter(tmp_path / "mine.eqp", INFO) as writer:
        for step in range(6):
            loss = math.nan if step == 3 else 5.0 - step
            readings = [Reading.scalar(step, "loss", loss)]
            if step % 2 == 0:
                rows = ((step + 0.25, step + 0.5), (-step - 0.25, 1e300))
                readings.append(
                    Reading(step=step, quantity="theta.p5", sites=SITES, values=rows)
                )
            writer.append(readings)
    return open_run(tmp_path / "mine.eqp")


def written(run: Run) -> dict[tuple[int, str, str, int], float]:
    """Return the readings as the file gives them one by one."""
    news, _ = run.since()
    return {
        (r.step, r.quantity, site, head): value
        for r in news.readings
        for site, row in zip(r.sites, r.values, strict=True)
        for head, value in enumerate(row)
    }


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        found[key] == value or (math.isnan(found[key]) and math.isnan(value))
        for key, value in expected.items()
    )


def keyed(rows) -> dict[tuple[int, str, str, int], float]:
    return {(step, q, site, head): value for step, q, site, head, value in rows}


def test_long_tables_hold_every_value_of_the_run(run: Run) -> None:
    expected = written(run)
    assert len(expected) == 6 + 3 * 4
    assert same(keyed(run.to_pandas().itertuples(index=False)), expected)
    assert same(keyed(run.to_polars().iter_rows()), expected)
    columns = run.to_arrow().to_pydict().values()
    assert same(keyed(zip(*columns, strict=True)), expected)


def test_wide_tables_have_a_row_per_step_and_know_what_was_not_recorded(
    run: Run,
) -> None:
    frame = run.to_pandas(form="wide")
    assert frame.index.tolist() == list(range(6)) and frame.index.name == "step"
    heads = [f"theta.p5/{site}/{head}" for site in SITES for head in (0, 1)]
    assert list(frame) == ["loss", *heads]
    assert frame.loc[4, "theta.p5/h.1/0"] == -4.25 and np.isnan(frame.loc[5, heads[0]])
    for table in (run.to_polars(form="wide"), pl.from_arrow(run.to_arrow(form="wide"))):
        assert table["step"].to_list() == list(range(6))
        # A NaN that was read is NaN; what was not read is null.
        assert table["loss"].is_null().sum() == 0 and table["loss"].is_nan().sum() == 1
        assert table[heads[0]].to_list() == [0.25, None, 2.25, None, 4.25, None]


def test_quantities_are_chosen_by_name_or_pattern(run: Run) -> None:
    assert set(run.to_pandas("theta.*")["quantity"]) == {"theta.p5"}
    assert set(run.to_pandas(["loss", "l*"])["quantity"]) == {"loss"}
    assert list(run.to_pandas("loss", form="wide")) == ["loss"]
    with pytest.raises(InputError, match=r"'lossy' \(the run has: loss, theta.p5\)"):
        run.to_pandas(["loss", "lossy"])
    with pytest.raises(InputError, match="form='tall'"):
        run.to_polars(form="tall")  # type: ignore[arg-type]


def test_a_run_without_readings_is_an_empty_table(tmp_path: Path) -> None:
    RunWriter(tmp_path / "new.eqp", INFO).close()
    run = open_run(tmp_path / "new.eqp")
    long = ["step", "quantity", "site", "head", "value"]
    assert list(run.to_pandas()) == run.to_polars().columns == long
    assert run.to_arrow().column_names == long and not len(run.to_arrow())
    assert not len(run.to_pandas(form="wide")) and not len(run.to_arrow(form="wide"))


@pytest.mark.parametrize("name", ["pandas", "polars", "pyarrow"])
def test_a_missing_library_is_one_line(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    method = {"pyarrow": "to_arrow"}.get(name, f"to_{name}")
    line = rf'needs {name}, which is not installed: pip install "equipoise\[export\]"'
    with pytest.raises(MissingExtraError, match=line):
        getattr(run, method)()


def test_frames_are_compact(run: Run) -> None:
    """Names are stored once: a run has millions of values and a few names."""
    frame = run.to_pandas()
    assert all(isinstance(frame[c].dtype, pd.CategoricalDtype) for c in frame[["site"]])
    assert run.to_polars()["quantity"].dtype == pl.Categorical
