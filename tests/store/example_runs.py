"""Readings to write, and what the summaries over them should be, the slow way."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from equipoise.records import Reading, RunInfo
from equipoise.store import Run

INFO = RunInfo(name="made", created="2026-11-15T21:00:00+00:00", version="0")


def reading(step: int, quantity: str, **sites: Sequence[float]) -> Reading:
    rows = tuple(tuple(values) for values in sites.values())
    return Reading(step=step, quantity=quantity, sites=tuple(sites), values=rows)


def sample(step: int) -> list[Reading]:
    """Return a step's readings; every value can be told from every other."""
    return [
        Reading.scalar(step, "loss", 1 / (step + 3)),
        reading(step, "norm", a=[step + 0.5], b=[math.sqrt(step)]),
        reading(step, "theta", a=[step, -step, 0.25], b=[step / 7, 2.0]),
    ]


def slow_summary(
    values: Sequence[Sequence[float]], level: int
) -> list[tuple[float, float, float, int]]:
    """Return (low, mean, high, broken) per 16^level rows, in exact arithmetic."""
    size = 16**level
    stretches = [values[i : i + size] for i in range(0, len(values), size)]
    return [_slow_bin([v for row in rows for v in row]) for rows in stretches]


def _slow_bin(values: list[float]) -> tuple[float, float, float, int]:
    finite = [v for v in values if math.isfinite(v)]
    broken = len(values) - len(finite)
    if not finite:
        return math.nan, math.nan, math.nan, broken
    mean = float(sum(map(Fraction, finite)) / len(finite))
    return min(finite), mean, max(finite), broken


def assert_summaries_agree(run: Run) -> None:
    """Every level of every site says what the rows say."""
    for quantity in run.quantities:
        for site, (steps, values) in run.series(quantity).items():
            rows = values.reshape(len(steps), -1).tolist()
            for level in range(4):
                assert_same(run.summary(quantity, site, level=level)[site], rows, level)
    assert run.damage == []


def assert_same(found, rows: list[list[float]], level: int) -> None:
    expected = slow_summary(rows, level)
    assert len(found.first) == len(expected)
    assert found.rows.sum() == len(rows)
    columns = zip(found.low, found.mean, found.high, found.broken, strict=True)
    for (low, mean, high, broken), truth in zip(columns, expected, strict=True):
        assert broken == truth[3]
        assert same(low, truth[0]) and same(high, truth[2])
        # A mean is rounded to fp32 once a level; shares of subnormals to 5e-324 each.
        scale = max(abs(truth[0]), abs(truth[2]))
        bound = (level + 1) * 2**-23 * scale + 1e-320
        assert same(mean, truth[1]) or abs(mean - truth[1]) <= bound


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
