"""What a finished run's own curves come to; reads the result, not the run file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

TARGET = 2.9
"""Nats: below what the frequencies of bytes alone give on the embedded corpus (3.1)."""
WINDOW = 10

GROUPS = {
    "qk": ("q", "k"),
    "vo": ("v", "o"),
    "feedforward": ("feedforward",),
    "embedding": ("embedding",),
}
"""Modules that a warm-up may throttle or leave free, and the roles that make them."""


def curve_measures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what losses, gradients and parts say, from a run's ``result.json``.

    steps_to_target   steps until ten losses in a row average ``TARGET``
    first_gradient    ‖g‖ of the first step, before clipping
    early_…           root mean square over the first fifth of the run
    """
    losses, norms = record["losses"], record["gradient_norms"]
    found = {"steps_to_target": steps_to(losses, TARGET)}
    if norms:
        found["first_gradient"] = norms[0]
    parts = record.get("parts") or {}
    if parts:
        found |= _early(parts, record["task"]["train"]["steps"] / 5)
        found |= _first_block(parts)
    return found | _by_position(record["measures"])


def steps_to(losses: Sequence[float], target: float) -> float:
    """Return how many steps it took until the last ten averaged ``target`` or less.

    >>> steps_to([5.0] * 10 + [1.0] * 10, 3.0), steps_to([5.0] * 20, 3.0)
    (15.0, inf)
    """
    for end in range(WINDOW, len(losses) + 1):
        if math.fsum(losses[end - WINDOW : end]) <= WINDOW * target:
            return float(end)
    return math.inf


def group_norms(
    parts: Mapping[str, Any], kind: str, roles: Iterable[str]
) -> np.ndarray:
    """Return per measured step the norm over every block's parts of these roles."""
    rows = [
        values
        for where, values in parts[kind].items()
        if where.rsplit(".", 1)[-1] in roles
    ]
    norm: np.ndarray = np.sqrt((np.array(rows, dtype=float) ** 2).sum(0))
    return norm


def _early(parts: Mapping[str, Any], until: float) -> dict[str, float]:
    early = np.array(parts["steps"]) < until
    found = {}
    for kind in ("gradient", "update"):
        for name, roles in GROUPS.items():
            norms = group_norms(parts, kind, roles)
            if norms.ndim:  # a model need not have every group
                size = float(np.sqrt((norms[early] ** 2).mean()))
                found[f"early_{kind}_{name}"] = size
    return found


def _first_block(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return the gradient of the first block's queries and keys, first and last."""
    if not {"0.q", "0.k"} <= parts["gradient"].keys():
        return {}
    q, k = parts["gradient"]["0.q"], parts["gradient"]["0.k"]
    return {
        "first_qk_start": math.hypot(q[0], k[0]),
        "first_qk": math.hypot(q[-1], k[-1]),
    }


EARLY_QUERIES = 8


def _by_position(measures: Mapping[str, float]) -> dict[str, float]:
    """Return θ of short rows and of long ones, and how many long ones are sharp."""
    theta = _positions(measures, "theta")
    if not theta:
        return {}
    sharp = _positions(measures, "sharp")
    short = [v for at, v in theta if 1 <= at < EARLY_QUERIES]
    long = [v for at, v in theta if at >= EARLY_QUERIES]
    peaked = [v for at, v in sharp if at >= EARLY_QUERIES]
    return {
        "theta_early": _mean(short),
        "theta_late": _mean(long),
        "sharp_rows": _mean(peaked),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _positions(measures: Mapping[str, float], kind: str) -> list[tuple[int, float]]:
    """Return (query, value) over all layers from names like ``theta_3_17``."""
    found = []
    for name, value in measures.items():
        words = name.split("_")
        if len(words) == 3 and words[0] == kind and words[2].isdigit():
            found.append((int(words[2]), value))
    return found
