"""Two things done in turns, in CPU seconds, and how sure the comparison is.

The order within a pair changes from pair to pair, so that drift favours nobody; the
interval is a bootstrap over pairs, seeded.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence

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
    drawn = (statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistic(values), *_middle(drawn)


def mean_of_medians(
    groups: Sequence[tuple[int, Sequence[float]]],
) -> tuple[float, float, float]:
    """Return the mean of groups' medians, weighted, and its 95 % bootstrap interval.

    Example:
        >>> mean_of_medians([(1, [2.0, 2.0]), (3, [1.0, 1.0, 1.0])])
        (1.25, 1.25, 1.25)
    """
    rng = random.Random(0)
    drawn = (
        _weighted([(n, rng.choices(values, k=len(values))) for n, values in groups])
        for _ in range(RESAMPLES)
    )
    return _weighted(groups), *_middle(drawn)


def _weighted(groups: Sequence[tuple[int, Sequence[float]]]) -> float:
    total = sum(n * statistics.median(values) for n, values in groups)
    return total / sum(n for n, _ in groups)


def _middle(drawn: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(drawn)
    return ordered[int(0.025 * RESAMPLES)], ordered[int(0.975 * RESAMPLES)]


def summary(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return what a table says of (plain, other) seconds."""
    ratios = [other / plain for plain, other in found]
    median, low, high = interval(ratios)
    return {
        "pairs": len(ratios),
        "plain ms": 1000 * statistics.median(plain for plain, _ in found),
        "median ratio": median,
        "95 % from": low,
        "95 % to": high,
        "worst ratio": max(ratios),
    }
