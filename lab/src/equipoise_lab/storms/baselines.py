"""Baselines: what others use to notice trouble, as statistics with their thresholds.

A statistic is made anew for every run and called once per step; the alarm is where it
passes its threshold: the published one, or one that is matched to a number of false
alarms (``scoring.matched``). Not a number, or no reading: −∞ or +∞, never in between.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise_lab.storms.scoring import Alarm, Maker, Readings, Statistic

LOSS, GRADIENT = "loss", "gradient.norm.total"
NOTHING = -math.inf


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A rule in use: its number, where it fires, and who says so."""

    make: Callable[[], Statistic]
    threshold: float
    source: str
    about: str
    """What it looks at: loss, gradient, reading, or nothing."""


def scalar(readings: Readings, name: str) -> float | None:
    """Return a step's single number, or None if it was not read."""
    values = readings.get(name)
    return None if values is None or not len(values) else float(values[0])


def _following(name: str, measure: Callable[[float], float]) -> Statistic:
    """Measure each value of a scalar; one that is not finite is beyond everything."""

    def statistic(step: int, readings: Readings) -> float:
        value = scalar(readings, name)
        if value is None:
            return NOTHING
        return measure(value) if math.isfinite(value) else math.inf

    return statistic


def _deviation(name: str, *, window: int, armed: int) -> Callable[[], Statistic]:
    """How many σ of the last ``window`` values a value is above their mean."""

    def make() -> Statistic:
        past: deque[float] = deque(maxlen=window)

        def deviation(value: float) -> float:
            found = NOTHING
            if len(past) >= armed:
                mean, sigma = float(np.mean(past)), float(np.std(past))
                found = (value - mean) / max(sigma, 1e-12)
            past.append(value)
            return found

        return _following(name, deviation)

    return make


def zclip() -> Statistic:
    """How many σ the gradient norm is above its exponential mean, α = 0.97 (ZClip)."""
    state = {"mean": 0.0, "variance": 0.0, "count": 0.0}

    def z_score(value: float) -> float:
        spread = math.sqrt(state["variance"])
        ready = state["count"] >= 25 and spread > 0  # its warm-up
        found = (value - state["mean"]) / spread if ready else NOTHING
        # What it clips it does not learn from.
        kept = state["mean"] + 2.5 * spread if found > 2.5 else value
        weight = 0.03 if state["count"] else 1.0
        change = kept - state["mean"]
        state["mean"] += weight * change
        state["variance"] = (1 - weight) * (state["variance"] + weight * change**2)
        state["count"] += 1
        return found

    return _following(GRADIENT, z_score)


def _largest(name: str) -> Callable[[], Statistic]:
    """The largest value of a reading over sites and heads."""

    def statistic(step: int, readings: Readings) -> float:
        values = readings.get(name)
        if values is None or not len(values):
            return NOTHING
        largest = float(np.max(values))  # NaN if any is
        return math.inf if math.isnan(largest) else largest

    return lambda: statistic


def kurtosis_cusum() -> Statistic:
    """CUSUM of the largest kurtosis, in σ of its first 20 readings, drift 0.5."""
    first: list[float] = []
    state = {"sum": 0.0}

    def statistic(step: int, readings: Readings) -> float:
        value = _largest("residual.kurtosis")()(step, readings)
        if not math.isfinite(value):
            return value
        if len(first) < 20:
            first.append(value)
            return NOTHING
        sigma = max(float(np.std(first)), 1e-12)
        z = (value - float(np.mean(first))) / sigma
        state["sum"] = max(0.0, state["sum"] + z - 0.5)
        return state["sum"]

    return statistic


def update_doubling() -> Statistic:
    """The update's norm over the median of its last 20 samples."""
    past: deque[float] = deque(maxlen=20)

    def statistic(step: int, readings: Readings) -> float:
        values = readings.get("update.norm")
        if values is None:
            return NOTHING
        value = math.sqrt(float((values**2).sum()))
        usual = sorted(past)[len(past) // 2] if len(past) >= 10 else math.inf
        past.append(value)
        return math.inf if math.isnan(value) else value / usual

    return statistic


def kill_loss_spike() -> Statistic:
    """llm-foundry's: 5 times running twice the window's mean, or half too high.

    The number is the smallest of the last five ratios; 2 or more if half is too high.
    """
    past: deque[float] = deque(maxlen=100)
    ratios: deque[float] = deque(maxlen=5)
    state = {"cap": math.nan}

    def smallest_ratio(value: float) -> float:
        if len(past) == 100:
            if math.isnan(state["cap"]):
                state["cap"] = min(10.0, max(past))
            ratios.append(value / (math.fsum(past) / 100))
        past.append(value)
        if len(ratios) < 5:
            return NOTHING
        high = sum(v > state["cap"] for v in past) / 100
        return max(min(ratios), 4 * high)

    return _following(LOSS, smallest_ratio)


def megatron() -> Statistic:
    """The loss over its largest of the first hundred steps (Megatron's rerun)."""
    state = {"largest": 0.0, "count": 0}

    def over_largest(value: float) -> float:
        state["count"] += 1
        if state["count"] <= 100:
            state["largest"] = max(state["largest"], value)
            return NOTHING
        return value / state["largest"]

    return _following(LOSS, over_largest)


def composite() -> Statistic:
    """Mean deviation of loss, gradient and activations, as R-Metric combines them."""
    parts = [
        _deviation(LOSS, window=64, armed=16)(),
        _deviation(GRADIENT, window=64, armed=16)(),
        _deviation("output.logit_norm", window=24, armed=8)(),
    ]
    last = [0.0, 0.0, 0.0]

    def statistic(step: int, readings: Readings) -> float:
        found = [part(step, readings) for part in parts]
        for place, value in enumerate(found):
            last[place] = last[place] if value == NOTHING else value
        return sum(last) / 3

    return statistic


def always() -> Statistic:
    """Fire at a step, whatever is read: it knows nothing."""
    return lambda step, readings: float(step == 100)


_RULES: tuple[tuple[str, Callable[[], Statistic], float, str, str], ...] = (
    # name, statistic, threshold, what it looks at, who says so
    ("loss, 3σ of 30 (W&B)", _deviation(LOSS, window=30, armed=15),
     3.0, "loss", "W&B alerts"),
    ("loss, 6σ of 128 (OLMo)", _deviation(LOSS, window=128, armed=64),
     6.0, "loss", "OLMo-core's stability monitor"),
    ("gradient, 6σ of 128 (OLMo)", _deviation(GRADIENT, window=128, armed=64),
     6.0, "gradient", "OLMo-core's step skipper"),
    ("gradient z-score (ZClip)", zclip, 2.5, "gradient", "arXiv 2504.02507"),
    ("max logit > 100", _largest("attention.max_logit"),
     100.0, "reading", "arXiv 2507.20534"),
    ("kurtosis, CUSUM", kurtosis_cusum,
     5.0, "reading", "Page's test at h = 5, k = 0.5"),
    ("update norm doubled", update_doubling, 2.0, "reading", "common practice"),
    ("κ_softmax maximum", _largest("precision.kappa_softmax"), 100.0, "reading",
     "Baek's κ_softmax; no threshold is published, 100 is the max logit's"),
    ("KillLossSpike", kill_loss_spike, 2.0, "loss", "llm-foundry"),
    ("Megatron", megatron, 10.0, "loss", "Megatron's rerun"),
    ("composite (after R-Metric)", composite,
     3.0, "reading", "EMNLP industry 2025.193; our weights"),
    ("always at step 100", always, 1.0, "nothing", "none"),
)  # fmt: skip
RULES = {
    name: Baseline(make=make, threshold=threshold, about=about, source=source)
    for name, make, threshold, about, source in _RULES
}


READ = (
    *(LOSS, GRADIENT, "output.logit_norm", "attention.max_logit", "update.norm"),
    *("residual.kurtosis", "precision.kappa_softmax"),
)
"""Everything they look at."""


def at_threshold(baseline: Baseline) -> Maker:
    """Return a baseline as a forecaster, at its own threshold."""

    def make() -> Alarm:
        statistic = baseline.make()
        return lambda step, readings: statistic(step, readings) >= baseline.threshold

    return make


BASELINES: dict[str, Maker] = {name: at_threshold(one) for name, one in RULES.items()}
"""Each at its published threshold."""
