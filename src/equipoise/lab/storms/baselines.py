"""Baselines: what others use to notice trouble, as forecasters of the benchmark.

Each maker returns a forecaster for one run; see ``scoring``. Sources of the thresholds
are named beside them.
"""

import math
from collections import deque
from collections.abc import Callable

from equipoise.lab.storms.scoring import Alarm, Maker, Readings

LOSS, GRADIENT = "loss", "gradient.norm.total"


def scalar(readings: Readings, name: str) -> float | None:
    """Return a step's single number, or None if it was not read."""
    values = readings.get(name)
    return None if values is None or not len(values) else float(values[0])


def _deviation(name: str, *, window: int, times: float, armed: int) -> Maker:
    """Alarm above mean + times · σ of the last ``window`` values."""

    def make() -> Alarm:
        past: deque[float] = deque(maxlen=window)

        def alarm(step: int, readings: Readings) -> bool:
            value = scalar(readings, name)
            if value is None:
                return False
            if not math.isfinite(value):
                return True
            mean = math.fsum(past) / len(past) if past else value
            square = math.fsum((v - mean) ** 2 for v in past) / max(1, len(past))
            fires = len(past) >= armed and value > mean + times * math.sqrt(square)
            past.append(value)
            return fires

        return alarm

    return make


def zclip() -> Alarm:
    """Gradient norm 2.5 σ above its exponential mean, α = 0.97 (ZClip)."""
    state = {"mean": 0.0, "variance": 0.0, "count": 0.0}

    def alarm(step: int, readings: Readings) -> bool:
        value = scalar(readings, GRADIENT)
        if value is None:
            return False
        if not math.isfinite(value):
            return True
        spread = math.sqrt(state["variance"])
        ready = state["count"] >= 25 and spread > 0  # its warm-up
        fires = ready and (value - state["mean"]) / spread > 2.5
        kept = state["mean"] + 2.5 * spread if fires else value
        weight = 0.03 if state["count"] else 1.0
        change = kept - state["mean"]
        state["mean"] += weight * change
        state["variance"] = (1 - weight) * (state["variance"] + weight * change**2)
        state["count"] += 1
        return fires

    return alarm


def _level(name: str, above: float) -> Maker:
    def make() -> Alarm:
        def alarm(step: int, readings: Readings) -> bool:
            values = readings.get(name)
            return values is not None and bool((~(values <= above)).any())

        return alarm

    return make


def update_doubling() -> Alarm:
    """An update norm twice the median of its last 20 samples."""
    past: deque[float] = deque(maxlen=20)

    def alarm(step: int, readings: Readings) -> bool:
        values = readings.get("update.norm")
        if values is None:
            return False
        value = math.sqrt(float((values**2).sum()))
        usual = sorted(past)[len(past) // 2] if len(past) >= 10 else math.inf
        past.append(value)
        return not value <= 2 * usual

    return alarm


def kill_loss_spike() -> Alarm:
    """llm-foundry's: 5 times running twice the window's mean, or half too high."""
    past: deque[float] = deque(maxlen=100)
    state = {"running": 0, "cap": math.nan}

    def alarm(step: int, readings: Readings) -> bool:
        value = scalar(readings, LOSS)
        if value is None:
            return False
        if len(past) < 100:
            past.append(value)
            return not math.isfinite(value)
        if math.isnan(state["cap"]):
            state["cap"] = min(10.0, max(past))
        outlier = not value < 2 * math.fsum(past) / len(past)
        state["running"] = state["running"] + 1 if outlier else 0
        past.append(value)
        high = sum(not v <= state["cap"] for v in past)
        return state["running"] >= 5 or high >= 50

    return alarm


def megatron() -> Alarm:
    """Ten times the largest loss of the first hundred steps (Megatron's rerun)."""
    state = {"largest": 0.0, "count": 0}

    def alarm(step: int, readings: Readings) -> bool:
        value = scalar(readings, LOSS)
        if value is None:
            return False
        if not math.isfinite(value):
            return True
        state["count"] += 1
        if state["count"] <= 100:
            state["largest"] = max(state["largest"], value)
            return False
        return value >= 10 * state["largest"]

    return alarm


def always(at: int) -> Callable[[], Alarm]:
    """Return a forecaster that knows nothing and fires at a step."""

    def make() -> Alarm:
        return lambda step, readings: step == at

    return make


BASELINES: dict[str, Maker] = {
    "loss z-score": _deviation(LOSS, window=64, times=4.0, armed=32),
    "loss, 6σ of 128 (OLMo)": _deviation(LOSS, window=128, times=6.0, armed=64),
    "gradient, 6σ of 128": _deviation(GRADIENT, window=128, times=6.0, armed=64),
    "gradient z-score (ZClip)": zclip,
    "max logit > 100": _level("attention.max_logit", 100.0),
    "update norm doubled": update_doubling,
    "KillLossSpike": kill_loss_spike,
    "Megatron": megatron,
    "always at step 100": always(100),
}
