"""What the forecast looks at: two dozen numbers of a sampled step, and their course.

Every number is an effect that training has on the model, none is a setting. It is read
in up to five ways: its level where that means the same for every model, its growth
since the first readings, and its change per five steps over the last two readings
(speed), over six (trend), and in both halves of the last sixteen (steady: a jump is
not). Changes are counted per step, so that it does not matter how often one samples,
as long as samples lie at least five steps apart.
What was not read is NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Rows = Mapping[str, Sequence[float]]
"""site → values."""
FIRST = 3
"""Readings that make the start."""
FAST, SLOW, HALF = 2, 6, 8
"""Readings back to which speed, trend and each half of a steady change reach."""
UNIT = 5
"""Steps per which changes are counted."""
TINY, MOST = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled step: quantity → site → values, and the model's blocks in order."""

    step: int
    table: Mapping[str, Rows]
    blocks: Sequence[str] = ()
    fresh: bool = True
    """Whether the run began with an untrained model."""
    _lns: dict[tuple[str, bool], list[float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Logarithms that more than one number is made of."""

    def numbers(self, quantity: str) -> list[float]:
        """Return every value of a quantity over sites and heads."""
        return [value for row in self.table.get(quantity, {}).values() for value in row]

    def lns(self, quantity: str) -> list[float]:
        """Return ln of every value of a quantity over sites and heads."""
        found = self._lns.get((quantity, False))
        if found is None:
            found = [_ln(value) for value in self.numbers(quantity)]
            self._lns[quantity, False] = found
        return found

    def lns_of_blocks(self, quantity: str) -> list[float]:
        """Return ln of each block's value, in order of depth."""
        found = self._lns.get((quantity, True))
        if found is None:
            rows = self.table.get(quantity, {})
            found = [_ln(rows[block][0]) for block in self.blocks if block in rows]
            self._lns[quantity, True] = found
        return found


def _ln(value: float) -> float:
    """Return ln, cut off at 1e±9; what is infinite is as large as can be."""
    if TINY < value < MOST:
        return math.log(value)
    return math.log(TINY if value <= TINY else MOST)  # NaN is beyond any


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _each_ln(quantity: str, how: Callable[[list[float]], float]) -> "Measure":
    """Return a measure: ln of the values, put together."""

    def measure(sample: Sample) -> float:
        values = sample.lns(quantity)
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


def _first_to_last(sample: Sample) -> float:
    norms = sample.lns_of_blocks("gradient.norm")
    return norms[0] - norms[-1] if len(norms) > 1 else math.nan


def _gradient_spread(sample: Sample) -> float:
    norms = sample.lns_of_blocks("gradient.norm")
    return max(norms) - min(norms) if len(norms) > 1 else math.nan


def _stream_over_depth(sample: Sample) -> float:
    sizes = sample.lns_of_blocks("residual.B")
    return sizes[-1] - sizes[0] if len(sizes) > 1 else math.nan


def total_gradient(sample: Sample) -> float:
    """Return ln of the whole gradient's norm."""
    norms = sample.numbers("gradient.norm")
    return _ln(math.sqrt(sum(v * v for v in norms))) if norms else math.nan


def _queries_and_keys(sample: Sample) -> float:
    """ln of the share of the gradient that queries and keys receive, mean of sites."""
    norms = sample.lns("gradient.qk")
    return _mean(norms) - total_gradient(sample) if norms else math.nan


def _update(sample: Sample) -> float:
    moved, size = (sample.table.get(q, {}) for q in ("update.norm", "weight.norm"))
    ratios = [_ln(moved[s][0] / size[s][0]) for s in moved if s in size and size[s][0]]
    return median(ratios) if ratios else math.nan


def _weights(sample: Sample) -> float:
    sizes = sample.numbers("weight.norm")
    return _ln(math.sqrt(sum(v * v for v in sizes))) if sizes else math.nan


def _unchanged(sample: Sample) -> float:
    """The median block's share of weights that an interval left as they were."""
    shares = [row[0] for row in sample.table.get("update.unchanged", {}).values()]
    return median(shares) if shares else math.nan


def _weight_spread(sample: Sample) -> float:
    """How far the block with the largest weights is above the median block."""
    sizes = sample.lns_of_blocks("weight.norm")
    return max(sizes) - median(sizes) if len(sizes) > 1 else math.nan


def _stream_step(sample: Sample) -> float:
    """The most that one block adds to the stream, in ln."""
    sizes = sample.lns_of_blocks("residual.B")
    return max((b - a for a, b in pairwise(sizes)), default=math.nan)


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
LEVEL, GROWTH, SPEED = "level", "growth", "speed"
TREND, STEADY = "trend", "steady"
WAYS = (LEVEL, GROWTH, SPEED, TREND, STEADY)


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a sample, the quantities behind it, and how its course is read."""

    measure: Measure
    quantity: str
    """The reading to show beside it."""
    ways: tuple[str, ...] = (LEVEL, GROWTH, SPEED, TREND)
    is_log: bool = True
    of_fresh: bool = False
    """Whether its level says something only of a model that began untrained."""


RELATIVE = (GROWTH, SPEED, TREND)
NUMBERS: dict[str, Number] = {
    "theta": Number(
        _each_ln("attention.theta.p5", _mean), "attention.theta.p5", of_fresh=True
    ),
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
    "update": Number(_update, "update.ratio", WAYS),
    "weights": Number(_weights, "weight.norm", RELATIVE),
    "weight spread": Number(_weight_spread, "weight.norm", RELATIVE),
    "unchanged": Number(_unchanged, "update.unchanged", (LEVEL, SPEED), is_log=False),
    "stream": Number(_each_ln("residual.B", max), "residual.B", RELATIVE),
    "stream over depth": Number(_stream_over_depth, "residual.B"),
    "stream step": Number(_stream_step, "residual.B", RELATIVE),
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
    "update.unchanged",
)
"""Everything the numbers are made of."""
AFTER_UPDATE = ("update.norm", "weight.norm", "update.unchanged")
"""Read after the optimiser's step: a sample has them from the one before."""


_FLAT = [(w, k) for k, n in enumerate(NUMBERS.values()) for w in n.ways]
_ROWS = np.array([WAYS.index(way) for way, _ in _FLAT])
_COLUMNS = np.array([k for _, k in _FLAT])
_OF_FRESH = np.array([number.of_fresh for number in NUMBERS.values()])
ALARMING: dict[str, int] = {
    "weights, speed": 1,
    "weight spread, speed": 1,
    "weight spread, trend": 1,
    "projections, speed": 1,
    "update, level": 1,
    "update, growth": 1,
    "update, steady": 1,
    "unchanged, speed": 1,
    "queries and keys, growth": -1,
    "first to last, growth": -1,
    "stream, trend": 1,
    "stream step, growth": 1,
    "theta, level": -1,
    "theta, growth": -1,
    "router load, growth": 1,
}
"""The features that the alarm looks at, and the side on which trouble lies."""


@dataclass(slots=True)
class Course:
    """The numbers of one run so far: makes a vector of every sample."""

    _past: list[tuple[int, Vector]] = field(default_factory=list)
    _first: list[list[float]] = field(default_factory=lambda: [[] for _ in NUMBERS])
    _start: Vector = field(default_factory=lambda: np.full(len(NUMBERS), math.nan))

    def add(self, sample: Sample) -> Vector:
        """Return the features of a sample, in the order of ``NAMES``."""
        values = np.array([number.measure(sample) for number in NUMBERS.values()])
        if self._past and sample.step <= self._past[-1][0]:
            self._past.clear()  # the run went back to a checkpoint
        self._past.append((sample.step, values))
        del self._past[: -2 * HALF - 1]
        self._begin(values)
        level = values if sample.fresh else np.where(_OF_FRESH, math.nan, values)
        ways = np.array(
            [
                level,
                values - self._start,
                self._change(FAST),
                self._change(SLOW),
                np.minimum(self._change(HALF), self._change(HALF, end=HALF)),
            ]
        )
        found: Vector = ways[_ROWS, _COLUMNS]
        return found

    def _change(self, back: int, end: int = 0) -> Vector:
        """Return the change per unit of steps over so many readings; NaN too early."""
        if len(self._past) <= back + end:
            return np.full(len(NUMBERS), math.nan)
        (step, then), (last, now) = self._past[-1 - end - back], self._past[-1 - end]
        change: Vector = (now - then) * (UNIT * back / (last - step))
        return change

    def _begin(self, values: Vector) -> None:
        """Note the median of the first few readings of each number."""
        for k in np.flatnonzero(np.isnan(self._start) & np.isfinite(values)).tolist():
            self._first[k].append(float(values[k]))
            if len(self._first[k]) == FIRST:
                self._start[k] = median(self._first[k])


UNITS = {SPEED: UNIT * FAST, TREND: UNIT * SLOW, STEADY: UNIT * HALF}
"""Steps over which a change is told."""


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
    since = "since the start" if way == GROWTH else f"in {UNITS[way]} steps"
    return f"{name} {times}{shown:.3g} {since}"
