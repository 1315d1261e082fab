"""Probabilities of the forecast: AUROC, Brier score and reliability, over readings.

Intervals are bootstraps over runs: readings of one run are not independent.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.judging.score import Model
from equipoise.lab.storms.bands import scores
from equipoise.lab.storms.recorded import Recorded

BINS = 5


def probabilities(
    followed: Sequence[tuple[Recorded, Model]], *, draws: int = 500
) -> dict[str, Any]:
    """Return AUROC, Brier score and reliability over readings, intervals over runs."""
    rows: list[tuple[np.ndarray[Any, Any], float]] = []
    for run, model in followed:
        z = scores(model, run)[run.rows]
        if len(z):
            p = np.array([model.probability(v) for v in z])
            rows.append((p, float(run.is_failure)))
    rng = np.random.default_rng(0)
    picks = [rng.integers(0, len(rows), len(rows)) for _ in range(draws)]
    numbers = {"auroc": _auroc, "brier": _brier}
    return {
        "readings": int(sum(len(p) for p, _ in rows)),
        **{
            name: {
                "value": number(rows),
                "interval": _interval([number([rows[i] for i in p]) for p in picks]),
            }
            for name, number in numbers.items()
        },
        "base_rate": _brier_of_base_rate(rows),
        "reliability": _reliability(rows, picks),
    }


Rows = Sequence[tuple[Any, float]]


def _flat(rows: Rows) -> tuple[Any, Any]:
    p = np.concatenate([one for one, _ in rows])
    return p, np.concatenate([np.full(len(one), y) for one, y in rows])


def _auroc(rows: Rows) -> float:
    """Return the chance that a reading ahead of a failure scores above a stable one."""
    p, y = _flat(rows)
    _, place, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # ties share their rank
    ones = y.sum()
    if not 0 < ones < len(y):
        return math.nan
    return float(
        (ranks[y == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(y) - ones))
    )


def _brier(rows: Rows) -> float:
    p, y = _flat(rows)
    return float(np.mean((p - y) ** 2))


def _brier_of_base_rate(rows: Rows) -> float:
    """Return the Brier score of saying the share of failures every time."""
    _, y = _flat(rows)
    return float(y.mean() * (1 - y.mean()))


def _interval(values: Sequence[float]) -> list[float]:
    known = [v for v in values if math.isfinite(v)]
    return np.quantile(known, [0.025, 0.975]).tolist() if known else [math.nan] * 2


def _reliability(rows: Rows, picks: Sequence[Any]) -> list[dict[str, Any]]:
    edges = np.linspace(0, 1, BINS + 1)
    table = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        here = _inside(rows, low, high)
        if here is None:
            continue
        draws = [_inside([rows[i] for i in pick], low, high) for pick in picks[:200]]
        table.append(
            {
                "from": low,
                "to": high,
                "readings": here[0],
                "predicted": here[1],
                "observed": here[2],
                "interval": _interval([draw[2] for draw in draws if draw is not None]),
            }
        )
    return table


def _inside(rows: Rows, low: float, high: float) -> tuple[int, float, float] | None:
    """Return how many forecasts are in a range, their mean, and how many fail."""
    p, y = _flat(rows)
    chosen = (p >= low) & ((p < high) | (high == 1))
    if not chosen.any():
        return None
    return int(chosen.sum()), float(p[chosen].mean()), float(y[chosen].mean())
