"""Measures of a finished run: a few numbers from its run file and its loss curve."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.store import Run, open_run

LAST = 5
"""Samples at the end of the run whose median is reported: one batch is noise."""


def measures(path: Path) -> dict[str, float]:
    """Return the run's end state: gradients over depth, θ, S and G.

    gradient_first_to_last   ‖g‖ of the first block over the last
    gradient_least_to_last   of the block with the smallest, over the last
    gradient_spread          largest over smallest of blocks 2 … N
    """
    run = open_run(path)
    found = _gradients(run) | _growth(run)
    for name, quantity in MEDIANS.items():
        found |= _median(run, quantity, name)
    for name in ("norm_factor", "branch_factor"):
        found |= _logarithms(run, f"backward.{name}", f"ln_{name}s")
    found |= _spread(run, "sensitivity.S", "S")
    found |= _spread(run, "sensitivity.S_residual", "S_residual")
    lowest = per_layer(run, "attention.theta.p5")
    return found | ({"theta_least": min(lowest.values())} if lowest else {})


MEDIANS = {
    "theta_p5": "attention.theta.p5",
    "theta_p50": "attention.theta.p50",
    "theta_p100": "attention.theta.p100",
    "entropy": "attention.entropy",
    "norm_factor": "backward.norm_factor",
    "branch_factor": "backward.branch_factor",
    "token_cosine": "residual.token_cosine",
    "lipschitz": "attention.lipschitz",
}
"""Measures that are a median over layers, with the same at the first sample."""


def per_layer(run: Run, quantity: str) -> dict[str, float]:
    """Return per site the median of the last samples, heads averaged."""
    if quantity not in run.quantities:
        return {}
    return {
        site: float(np.median(_by_step(values)[-LAST:]))
        for site, (_, values) in run.series(quantity).items()
    }


def first_values(run: Run, quantity: str) -> dict[str, float]:
    """Return per site the first sample, heads averaged."""
    return {
        site: float(_by_step(values)[0])
        for site, (_, values) in run.series(quantity).items()
    }


def _logarithms(run: Run, quantity: str, name: str) -> dict[str, float]:
    """Return Σ ln over all sublayers, at the end and at the first sample."""
    if quantity not in run.quantities:
        return {}
    ends, first = per_layer(run, quantity), first_values(run, quantity)
    return {
        name: sum(_ln(value) for value in ends.values()),
        f"{name}_start": sum(_ln(value) for value in first.values()),
    }


def _ln(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _by_step(values: np.ndarray) -> np.ndarray:
    return values if values.ndim == 1 else values.mean(1)


def _gradients(run: Run) -> dict[str, float]:
    norms = per_layer(run, "gradient.norm")
    blocks = [norms[b] for b in run.info.details.get("blocks", []) if b in norms]
    if len(blocks) < 2:
        return {}
    rest = blocks[1:]
    first = first_values(run, "gradient.norm")
    start = [first[b] for b in run.info.details["blocks"] if b in first]
    return {
        "gradient_least_to_last_start": ratio(min(start), start[-1]),
        "gradient_first_to_last": ratio(blocks[0], blocks[-1]),
        "gradient_least_to_last": ratio(min(blocks), blocks[-1]),
        "gradient_spread": ratio(max(rest), min(rest)),
    }


def ratio(a: float, b: float) -> float:
    """Return a / b; infinite where b is nothing, unknown where both are."""
    if b:
        return a / b
    return math.inf if a else math.nan


def _median(run: Run, quantity: str, name: str) -> dict[str, float]:
    values = per_layer(run, quantity)
    if not values:
        return {}
    first = first_values(run, quantity)
    return {
        name: statistics.median(values.values()),
        f"{name}_start": statistics.median(first.values()),
    }


def _spread(run: Run, quantity: str, name: str) -> dict[str, float]:
    """Return the median over layers, the CV, and the slope of ln S over depth 0 … 1."""
    found = _median(run, quantity, name)
    values = list(per_layer(run, quantity).values())
    if len(values) < 2:
        return found
    found[f"{name}_cv"] = ratio(statistics.pstdev(values), statistics.fmean(values))
    if min(values) > 0:
        depth = np.linspace(0, 1, len(values))
        found[f"{name}_slope"] = float(np.polyfit(depth, np.log(values), 1)[0])
    return found


def _growth(run: Run) -> dict[str, float]:
    """Return how much G and B̄² grew, in natural logarithms, as Emadi's E.6 asks."""
    found = {}
    for quantity, power, name in (
        ("projection.G", 1, "growth_G"),
        ("residual.B", 2, "growth_B2"),
    ):
        if quantity in run.quantities:
            logs = [
                power * math.log(ratio(float(v[-1]), float(v[0])))
                for _, v in ((s, _by_step(x)) for s, x in run.series(quantity).values())
                if v[0] > 0 and v[-1] > 0
            ]
            found[name] = statistics.median(logs) if logs else math.nan
    return found


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
