"""Summaries agree with the rows, and cost what the points cost."""

import math
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from equipoise.records import Reading
from equipoise.store import RunWriter, open_run
from tests.store.example_runs import INFO, assert_summaries_agree, reading, sample

values = st.one_of(
    st.floats(-1e30, 1e30),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e300, 1.7e308, 5e-324]),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.eqp"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 255, 256, 300])
def test_agrees_with_the_rows(path: Path, count: int) -> None:
    with RunWriter(path, INFO) as writer:
        for step in range(count):
            writer.append(sample(step))
        assert_summaries_agree(open_run(path))
    assert_summaries_agree(open_run(path))


@given(st.data(), st.integers(1, 40))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_agrees_on_broken_values(tmp_path: Path, data: st.DataObject, n: int) -> None:
    path = tmp_path / "run.eqp"
    path.unlink(missing_ok=True)
    flat = st.lists(values, min_size=5, max_size=5)
    with RunWriter(path, INFO) as writer:
        for step in range(n):
            row = data.draw(flat)
            writer.append(
                [
                    reading(step, "q", a=row[:3], b=row[3:]),
                    reading(step, "f", c=row[:1]),
                ]
            )
    assert_summaries_agree(open_run(path))


def test_many_steps_in_one_append(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([r for step in range(100) for r in sample(step)])
        writer.append([r for step in range(100, 300) for r in sample(step)])
    assert_summaries_agree(open_run(path))


def test_a_resumed_writer_completes_the_bins_of_the_last(path: Path) -> None:
    for start in range(0, 600, 37):
        with RunWriter(path, INFO) as writer:
            writer.append([r for s in range(start, start + 37) for r in sample(s)])
    assert_summaries_agree(open_run(path))


def test_one_broken_step_neither_vanishes_nor_blanks_the_curve(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        for step in range(64):
            writer.append(
                [Reading.scalar(step, "loss", math.nan if step == 20 else 2.0)]
            )
    found = open_run(path).summary("loss", level=1)[""]
    assert found.mean.tolist() == [2.0] * 4
    assert found.broken.tolist() == [0, 1, 0, 0]


def test_points_bound_the_answer(path: Path) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([Reading.scalar(s, "loss", float(s)) for s in range(5000)])
    run = open_run(path)
    for points in (10_000, 5015, 5000, 400, 300, 100, 30):
        found = run.summary("loss", points=points)[""]
        assert len(found.first) <= points
        assert found.rows.sum() == 5000
    assert len(run.summary("loss", points=6000)[""].first) == 5000


@pytest.mark.parametrize("window", [(0, 10), (100, 400), (700, 701), (990, 2000)])
@pytest.mark.parametrize("points", [20, 5000])
def test_a_window_shows_its_steps_only(path: Path, window, points: int) -> None:
    with RunWriter(path, INFO) as writer:
        writer.append([reading(s, "q", a=[s, s]) for s in range(1000)])
    found = open_run(path).summary("q", between=window, points=points)["a"]
    assert (found.last >= window[0]).all() and (found.first <= window[1]).all()
    assert found.first[0] <= window[0] and found.last[-1] >= min(window[1], 999)
    if points == 5000:
        np.testing.assert_array_equal(
            found.mean, np.arange(window[0], min(window[1], 999) + 1)
        )


def test_no_view_scans_raw_rows(path: Path) -> None:
    """Of 5000 wide rows, a view of 100 points touches the last few only."""
    with RunWriter(path, INFO) as writer:
        writer.append([reading(s, "q", a=[float(s)] * 8) for s in range(5000)])
    run = open_run(path)
    import equipoise.store.summaries as summaries

    touched = []
    original = summaries.unpack
    summaries.unpack = lambda blobs, width: (
        touched.append(len(blobs)) or original(blobs, width)
    )
    try:
        run.summary("q", points=100)
        run.summary("q", points=5016)
    finally:
        summaries.unpack = original
    assert sum(touched) <= 2 * 15
