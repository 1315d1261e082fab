"""A line of the list: short, with the course of the loss; columns tell runs apart."""

import math
from pathlib import Path

import numpy as np
import pytest

from equipoise.judging.card import Card
from equipoise.records import Reading, RunInfo
from equipoise.report.run_list import CURVE_POINTS, MOST_COLUMNS, run_row, with_columns
from equipoise.store import RunWriter, open_run


def row(path: Path, losses: list[float], **details: object) -> dict[str, object]:
    created = "2026-11-15T20:00:00+00:00"
    info = RunInfo(name="mine", created=created, version="0.2.0", details=details)
    with RunWriter(path, info) as writer:
        writer.append(
            [
                reading
                for step, loss in enumerate(losses)
                for reading in (
                    Reading.scalar(step, "loss", loss),
                    Reading.scalar(step, "learning_rate", 3e-4),
                )
            ],
            card=Card(step=0, samples=1, sections={"batch": {"tokens": 256}}),
        )
    run = open_run(path)
    return run_row(run, run.verdict)


@pytest.mark.parametrize("steps", [1, 7, 40, 41, 1000])
def test_the_curve_is_the_loss_in_few_points(steps: int, tmp_path: Path) -> None:
    losses = list(np.linspace(5, 2, steps))
    found = row(tmp_path / "a.eqp", losses)
    curve = found["curve"]
    assert len(curve["steps"]) == len(curve["values"]) <= CURVE_POINTS  # type: ignore[index]
    assert curve["steps"][-1] == steps - 1 == found["last"]  # type: ignore[index]
    assert found["loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert found["rate"] == pytest.approx(3e-4) and found["tokens"] == 256 * steps
    middle = np.interp(curve["steps"], range(steps), losses)  # type: ignore[index]
    assert np.abs(np.array(curve["values"]) - middle).max() < 0.1  # type: ignore[index]


def test_a_loss_that_broke_says_so(tmp_path: Path) -> None:
    found = row(tmp_path / "a.eqp", [3.0, 2.0, math.nan])
    assert found["broken"] and found["loss"] is None
    assert found["curve"]["values"] == [3.0, 2.0, None]  # type: ignore[index]


def test_columns_are_settings_that_not_all_runs_share(tmp_path: Path) -> None:
    rows = [
        row(tmp_path / f"{n}.eqp", [2.0], width=8, lr=n % 2, seed=n, note="x" * 999)
        for n in range(4)
    ]
    listed = with_columns([*rows, {"key": "broken", "trouble": "not a run"}])
    assert listed["columns"] == ["lr", "seed"]
    assert listed["runs"][1]["settings"] == {"lr": "1", "seed": "1"}
    assert listed["runs"][-1]["settings"] == {}


def test_many_settings_are_bounded(tmp_path: Path) -> None:
    rows = [
        row(tmp_path / f"{n}.eqp", [2.0], **{f"s{i}": n * i for i in range(200)})
        for n in range(2)
    ]
    assert len(with_columns(rows)["columns"]) == MOST_COLUMNS
