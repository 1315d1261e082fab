"""Where a sweep stops working, seed by seed, and between two settings."""

import math
from collections.abc import Mapping, Sequence

from equipoise.lab.statistics import Paired, paired


def edge(loss_by_setting: Mapping[float, float], *, within: float) -> float:
    """Return the setting at which the loss leaves ``within`` nats of the best.

    Between the last setting that trains and the next, in logarithms, in proportion to
    the loss; infinite if the largest setting still trains. Settings beyond the first
    that failed do not count: beyond the edge, luck is not stability.

    >>> round(edge({1.0: 2.0, 10.0: 2.0, 100.0: 3.0}, within=0.5), 4)
    31.6228
    >>> edge({1.0: 2.0, 10.0: 2.1}, within=0.5)
    inf
    """
    finite = {s: v for s, v in loss_by_setting.items() if math.isfinite(v)}
    if not finite:
        return math.nan
    best = min(finite, key=lambda s: finite[s])
    limit, last = finite[best] + within, best
    for setting in sorted(s for s in loss_by_setting if s > best):
        loss = loss_by_setting[setting]
        if not loss <= limit:
            share = _share(finite[last], limit, loss)
            return math.exp((1 - share) * math.log(last) + share * math.log(setting))
        last = setting
    return math.inf


def _share(inside: float, limit: float, outside: float) -> float:
    """Return how far towards the failed setting the limit lies; half if it diverged."""
    if not math.isfinite(outside):
        return 0.5
    return (limit - inside) / (outside - inside)


def over_seeds(values: Sequence[float]) -> Paired:
    """Return the mean with its 95 % interval over seeds."""
    return paired(values, [0.0] * len(values))


def interval(values: Sequence[float]) -> str:
    """Return mean and interval as text; what is not finite says so.

    >>> interval([1.0, 2.0, 3.0])
    '+2 [-0.484, +4.48]'
    """
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return f"{known[0]:+.3g}" if known else "–"
    found = over_seeds(known)
    return f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}]"
