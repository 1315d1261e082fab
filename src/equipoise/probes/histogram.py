"""θ in fixed bins: counts of several ranks add up where their quantiles do not.

Axes, in this file:  H head · N row · Z bin.

Bins are even in the angle a of θ = sin²(πa/2): the widest, at θ = ½, is π/2/BINS; at
both ends, where heads that saturate or stay undecided are told apart, they are narrow.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from jaxtyping import Float
from torch import Tensor

BINS = 512
HISTOGRAM = "attention.theta.histogram"
"""Only between ranks: what is written are the quantiles of all ranks' rows."""


def theta_histogram(theta_HN: Float[Tensor, "H N"]) -> Float[Tensor, "H Z"]:
    """Return how many rows of each head fall into each bin; NaN falls into none.

    Example:
        >>> import torch
        >>> counts = theta_histogram(torch.tensor([[0.0, 1.0, 1.0, torch.nan]]))
        >>> counts[0, 0], counts[0, -1], counts.sum()
        (tensor(1.), tensor(2.), tensor(3.))
    """
    known_HN = ~theta_HN.isnan()
    angle_HN = theta_HN.masked_fill(~known_HN, 0.0).clamp(0, 1).sqrt().asin()
    bin_HN = (angle_HN * (2 * BINS / math.pi)).long().clamp(max=BINS - 1)
    counts_HZ = theta_HN.new_zeros(theta_HN.shape[0], BINS)
    return counts_HZ.scatter_add_(1, bin_HN, known_HN.to(theta_HN.dtype))


def theta_at(bins: float) -> float:
    """Return θ at a place on the axis of bins.

    >>> theta_at(0), theta_at(BINS / 2), theta_at(BINS)
    (0.0, 0.5, 1.0)
    """
    return round(math.sin(math.pi * bins / (2 * BINS)) ** 2, 15)


def width_at(theta: float) -> float:
    """Return how wide the bin around θ is: no quantile is further off than this.

    >>> f"{width_at(0.5):.4f} {width_at(1.0):.6f}"
    '0.0031 0.000009'
    """
    place = min(int(math.asin(math.sqrt(theta)) * 2 * BINS / math.pi), BINS - 1)
    return theta_at(place + 1) - theta_at(place)


def quantile(counts: Sequence[float], q: float) -> float:
    """Return the q-quantile as torch interpolates it, rows spread evenly in each bin.

    Example:
        >>> import torch
        >>> rows = torch.linspace(0, 1, 101)[None]
        >>> abs(quantile(theta_histogram(rows)[0].tolist(), 0.25) - 0.25) < 0.003
        True
    """
    upto = list(accumulate(counts))
    if not upto[-1]:
        return math.nan
    at = q * (upto[-1] - 1)
    below, above = (_of_rank(upto, rank) for rank in (math.floor(at), math.ceil(at)))
    return below + (at - math.floor(at)) * (above - below)


def _of_rank(upto: Sequence[float], rank: int) -> float:
    """Return about which θ the row has that ``rank`` rows lie below."""
    place = bisect_right(upto, rank)
    before = upto[place - 1] if place else 0.0
    return theta_at(place + (rank - before + 0.5) / (upto[place] - before))
