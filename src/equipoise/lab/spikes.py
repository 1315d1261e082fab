"""How often a curve jumped, by rules that are written down."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

# A loss spike: above the median of the last 50 losses by more than 6 robust standard
# deviations (1.4826 · MAD), at least .1 nats; consecutive steps are one spike.
WINDOW, DEVIATIONS, LEAST = 50, 6.0, 0.1


def spikes(losses: Sequence[float]) -> int:
    """Return how many times the loss jumped; a loss that is not finite is one too.

    >>> spikes([3.0] * 60 + [5.0, 5.0] + [3.0] * 60)
    1
    """
    x = np.asarray(losses, dtype=float)
    above = [_jumped(x[max(0, t - WINDOW) : t], x[t]) for t in range(len(x))]
    return sum(now and not before for before, now in pairwise([False, *above]))


def _jumped(past: np.ndarray, value: float) -> bool:
    if not math.isfinite(value):
        return True
    past = past[np.isfinite(past)]
    if len(past) < WINDOW // 2:
        return False
    median = float(np.median(past))
    deviation = 1.4826 * float(np.median(np.abs(past - median)))
    return bool(value > median + max(LEAST, DEVIATIONS * deviation))


def spike_score(values: Sequence[float], *, window: int = 1000) -> float:
    """Return the share of values at least 7 rolling standard deviations from the mean.

    The mean and deviation are of the ``window`` values before, as OLMo 2 defines it.

    >>> spike_score([0.0, 1.0] * 50 + [100.0])
    0.009900990099009901
    """
    x = np.asarray(values, dtype=float)
    if not len(x):
        return math.nan
    far = [_is_far(x[max(0, t - window) : t], x[t]) for t in range(len(x))]
    return sum(far) / len(x)


def _is_far(past: np.ndarray, value: float) -> bool:
    # Fewer than 20 values say nothing about their own spread.
    if len(past) < 20:
        return False
    return not bool(abs(value - past.mean()) < 7 * past.std())


def gradient_spikes(norms: Sequence[float], *, clip: float, times: float = 5) -> int:
    """Return how many steps had ‖g‖ above ``times`` · clip, Emadi's reading of §7."""
    return sum(not norm <= times * clip for norm in norms)
