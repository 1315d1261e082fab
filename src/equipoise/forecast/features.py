"""What the forecast looks at: two dozen numbers of a sampled step, and their course.

Every number is an effect that training has on the model, none is a setting. Each is
read three ways: its level where that means the same for every model, its growth since
the first readings, and its trend over the last few. What was not read is NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Rows = Mapping[str, Sequence[float]]
"""site → values."""
FIRST, BACK = 3, 6
"""Readings that make the start, and readings back to which a trend reaches."""
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled step: quantity → site → values, and the model's blocks in order."""

    step: int
    table: Mapping[str, Rows]
    blocks: Sequence[str] = ()
    before: Rows = field(default_factory=dict)
    """The weights' norms of the sample before."""

    def numbers(self, quantity: str) -> list[float]:
        """Return every value of a quantity over sites and heads."""
        return [value for row in self.table.get(quantity, {}).values() for value in row]


def _ln(value: float) -> float:
    """Return ln, cut off at 1e±9; what is infinite is as large as can be."""
    if math.isnan(value):
        return math.log(1 / TINY)
    return math.log(min(max(value, TINY), 1 / TINY))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _each_ln(quantity: str, how: Callable[[list[float]], float]) -> "Measure":
    """Return a measure: ln of the values, put together."""

    def measure(sample: Sample) -> float:
        values = [_ln(v) for v in sample.numbers(quantity)]
        return how(values) if values else math.nan

    return measure


def _plain(quantity: str, how: Callable[[list[float]], float]) -> "Measure":
    def measure(sample: Sample) -> float:
        values = [v for v in sample.numbers(quantity) if math.isfinite(v)]
        return how(values) if values else math.nan

    return measure


def _saturated(sample: Sample) -> float:
    values = sample.numbers("attention.theta.p50")
    return _mean([float(v < 0.5) for v in values])


def _over_blocks(sample: Sample, quantity: str) -> list[float]:
    rows = sample.table.get(quantity, {})
    return [_ln(rows[block][0]) for block in sample.blocks if block in rows]


def _first_to_last(sample: Sample) -> float:
    norms = _over_blocks(sample, "gradient.norm")
    return norms[0] - norms[-1] if len(norms) > 1 else math.nan


def _gradient_spread(sample: Sample) -> float:
    norms = _over_blocks(sample, "gradient.norm")
    return max(norms) - min(norms) if len(norms) > 1 else math.nan


def _stream_over_depth(sample: Sample) -> float:
    sizes = _over_blocks(sample, "residual.B")
    return sizes[-1] - sizes[0] if len(sizes) > 1 else math.nan


def total_gradient(sample: Sample) -> float:
    """Return ln of the whole gradient's norm."""
    norms = sample.numbers("gradient.norm")
    return _ln(math.sqrt(sum(v * v for v in norms))) if norms else math.nan


def _queries_and_keys(sample: Sample) -> float:
    """ln of the share of the gradient that queries and keys receive, mean of sites."""
    norms = [_ln(v) for v in sample.numbers("gradient.qk")]
    return _mean(norms) - total_gradient(sample) if norms else math.nan


def _update(sample: Sample) -> float:
    moved, size = (sample.table.get(q, {}) for q in ("update.norm", "weight.norm"))
    ratios = [_ln(moved[s][0] / size[s][0]) for s in moved if s in size and size[s][0]]
    return median(ratios) if ratios else math.nan


def _weights(sample: Sample) -> float:
    sizes = sample.numbers("weight.norm")
    return _ln(math.sqrt(sum(v * v for v in sizes))) if sizes else math.nan


def _lost(sample: Sample) -> float:
    """ln of how far weights' norms moved since the sample before, over one update."""
    before, now = sample.before, sample.table.get("weight.norm", {})
    moved = sample.table.get("update.norm", {})
    shares = [
        _ln(abs(now[s][0] - before[s][0]) / moved[s][0])
        for s in now
        if s in before and s in moved and moved[s][0]
    ]
    return median(shares) if shares else math.nan


def _router_entropy(sample: Sample) -> float:
    """The lowest of the routers' entropies, as a share of the largest possible."""
    loads = sample.table.get("router.load", {})
    experts = max((len(row) for row in loads.values()), default=0)
    values = sample.numbers("router.entropy")
    return min(values) / math.log(experts) if values and experts > 1 else math.nan


def _router_load(sample: Sample) -> float:
    """The busiest expert's load, as a multiple of an even one's."""
    loads = sample.table.get("router.load", {})
    return max((max(r) * len(r) for r in loads.values() if r), default=math.nan)


Measure = Callable[[Sample], float]
LEVEL, GROWTH, TREND = "level", "growth", "trend"


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a sample, the quantities behind it, and how its course is read."""

    measure: Measure
    quantity: str
    """The reading to show beside it."""
    ways: tuple[str, ...] = (LEVEL, GROWTH, TREND)
    is_log: bool = True


RELATIVE = (GROWTH, TREND)
NUMBERS: dict[str, Number] = {
    "theta": Number(_each_ln("attention.theta.p5", _mean), "attention.theta.p5"),
    "saturated": Number(_saturated, "attention.theta.p50", is_log=False),
    "logits": Number(_each_ln("attention.max_logit", _mean), "attention.max_logit"),
    "max logit": Number(_each_ln("attention.max_logit", max), "attention.max_logit"),
    "entropy": Number(
        _plain("attention.entropy", _mean), "attention.entropy", RELATIVE, is_log=False
    ),
    "sink": Number(_plain("attention.sink", _mean), "attention.sink", is_log=False),
    "kappa": Number(
        _each_ln("precision.kappa_softmax", max), "precision.kappa_softmax", RELATIVE
    ),
    "first to last": Number(_first_to_last, "gradient.first_to_last"),
    "gradient spread": Number(_gradient_spread, "gradient.norm"),
    "gradient": Number(total_gradient, "gradient.norm.total", RELATIVE),
    "queries and keys": Number(_queries_and_keys, "gradient.qk"),
    "update": Number(_update, "update.ratio"),
    "weights": Number(_weights, "weight.norm", RELATIVE),
    "lost updates": Number(_lost, "weight.norm", (LEVEL,)),
    "stream": Number(_each_ln("residual.B", max), "residual.B", RELATIVE),
    "stream over depth": Number(_stream_over_depth, "residual.B"),
    "token cosine": Number(
        _plain("residual.token_cosine", max), "residual.token_cosine", is_log=False
    ),
    "kurtosis": Number(_each_ln("residual.kurtosis", max), "residual.kurtosis"),
    "norm scale": Number(_each_ln("norm.sigma.p50", max), "norm.sigma.p50", RELATIVE),
    "norm gain": Number(_each_ln("norm.gain", max), "norm.gain", RELATIVE),
    "projections": Number(_each_ln("projection.G", _mean), "projection.G", RELATIVE),
    "output logits": Number(_each_ln("output.logit_norm", max), "output.logit_norm"),
    "router entropy": Number(_router_entropy, "router.entropy", is_log=False),
    "router load": Number(_router_load, "router.load", is_log=False),
}
NAMES = tuple(f"{name}, {way}" for name, n in NUMBERS.items() for way in n.ways)
QUANTITIES = (
    *("attention.theta.p5", "attention.theta.p50", "attention.max_logit"),
    *("attention.entropy", "attention.sink", "precision.kappa_softmax"),
    *("gradient.norm", "gradient.qk", "update.norm", "weight.norm", "residual.B"),
    *("residual.token_cosine", "residual.kurtosis", "norm.sigma.p50", "norm.gain"),
    *("projection.G", "output.logit_norm", "router.entropy", "router.load"),
)
"""Everything the numbers are made of."""
AFTER_UPDATE = ("update.norm", "weight.norm")
"""Read after the optimiser's step: a sample has them from the one before."""


@dataclass(slots=True)
class Course:
    """The numbers of one run so far: makes a vector of every sample."""

    _past: dict[str, list[float]] = field(default_factory=dict)
    _start: dict[str, float] = field(default_factory=dict)
    _weights: Rows = field(default_factory=dict)

    def add(self, sample: Sample) -> Vector:
        """Return the features of a sample, in the order of ``NAMES``."""
        sample = replace(sample, before=self._weights)
        self._weights = sample.table.get("weight.norm", {})
        found: list[float] = []
        for name, number in NUMBERS.items():
            value = number.measure(sample)
            past = self._past.setdefault(name, [])
            past.append(value)
            del past[: -BACK - 1]
            start = self._begin(name, past)
            ways = {
                LEVEL: value,
                GROWTH: value - start,
                TREND: value - past[0] if len(past) > BACK else math.nan,
            }
            found += [ways[way] for way in number.ways]
        return np.array(found)

    def _begin(self, name: str, past: Sequence[float]) -> float:
        """Return the median of the first few readings; NaN until there are so many."""
        if name not in self._start:
            known = [v for v in past if math.isfinite(v)]
            if len(known) < FIRST:
                return math.nan
            self._start[name] = median(known[:FIRST])
        return self._start[name]


def described(feature: str, value: float) -> str:
    """Return a feature in words, with its number.

    >>> described("max logit, growth", 2.302585)
    'max logit ×10 since the start'
    >>> described("saturated, level", 0.25)
    'saturated 0.25'
    """
    name, _, way = feature.rpartition(", ")
    shown = math.exp(value) if NUMBERS[name].is_log else value
    times = "×" if NUMBERS[name].is_log else "by "
    if way == LEVEL:
        return f"{name} {shown:.3g}"
    since = "since the start" if way == GROWTH else f"in {BACK} readings"
    return f"{name} {times}{shown:.3g} {since}"
