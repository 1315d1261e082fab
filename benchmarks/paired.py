"""Two things done in turns, in CPU seconds, and how sure the comparison is.

The order within a pair changes from pair to pair, so that drift favours nobody; the
interval is a bootstrap over pairs, seeded.
"""

import random
import statistics
from collections.abc import Callable, Sequence

RESAMPLES = 2000


def pairs(
    plain: Callable[[], float], other: Callable[[], float], *, count: int
) -> list[tuple[float, float]]:
    """Return (plain, other) seconds of each pair."""
    found = []
    for i in range(count):
        if i % 2:
            second = other()
            found.append((plain(), second))
        else:
            first = plain()
            found.append((first, other()))
    return found


def interval(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[float, float, float]:
    """Return a statistic of the values and its 95 % bootstrap interval.

    Example:
        >>> interval([1.0, 1.0, 1.0])
        (1.0, 1.0, 1.0)
    """
    rng = random.Random(0)
    drawn = sorted(
        statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
    return statistic(values), low, high
