"""The ladder in torch: for every device but the CPU, and where numba is absent.

Axes, in this file:  N row · K key · n key, sorted from large to small.
The steps that close almost every row are vectorised; the few rows left open are
finished one by one on the CPU by the same code that the compiled kernel runs.
"""

import numpy as np
import torch
from torch import Tensor

from equipoise.numerics.rows.ladder import Options
from equipoise.numerics.rows.ladder import intervals as intervals_on_cpu

# Runs of keys taken by the fill: each round lands below half the remaining gap.
_ROUNDS = 24
_SWAPS = 3


def exact_sum(v_NK: Tensor) -> Tensor:
    """Return row sums to the last bit or two: a tree of error-free additions."""
    high, low = v_NK, torch.zeros_like(v_NK)
    while high.shape[-1] > 1:
        if high.shape[-1] % 2:
            high = torch.nn.functional.pad(high, (0, 1))
            low = torch.nn.functional.pad(low, (0, 1))
        a, b = high[..., ::2], high[..., 1::2]
        high = a + b
        back = high - a
        lost = (a - (high - back)) + (b - back)
        low = low[..., ::2] + low[..., 1::2] + lost
    return (high + low)[..., 0]


def theta(inside: Tensor, outside: Tensor) -> Tensor:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    near = 1 - ((inside - outside) / total) ** 2
    far = 4 * (inside / total) * (outside / total)
    return torch.where(4 * torch.minimum(inside, outside) > total, near, far)


def largest_first(v_Nn: Tensor, half_N: Tensor) -> tuple[Tensor, Tensor]:
    """Fill S with every key that still fits, largest first; return (gap, side).

    Sorted keys are taken in runs: a run ends where the next key does not fit, and the
    next run starts at the first key that does. Both ends are binary searches in the
    running sum and in the keys, so a round costs O(log K) per row. The key that ended a
    run is tried too: S as it was, and this key, may overshoot by little.
    """
    N, n = v_Nn.shape
    sums = torch.nn.functional.pad(v_Nn.cumsum(-1), (1, 0))
    padded = torch.nn.functional.pad(v_Nn, (0, 1), value=torch.inf)
    gap = half_N[:, None].clone()
    at = torch.zeros(N, 1, dtype=torch.long, device=v_Nn.device)
    edge = torch.zeros(N, n + 2, dtype=torch.int8, device=v_Nn.device)
    one = torch.ones_like(at, dtype=torch.int8)
    best, best_edge = gap.clone(), edge.clone()
    for _ in range(_ROUNDS):
        at = torch.maximum(at, torch.searchsorted(-v_Nn, -gap))
        reach = sums.gather(1, at) + gap
        stop = torch.maximum(torch.searchsorted(sums, reach, right=True) - 1, at)
        edge = edge.scatter_add(1, at, one).scatter_add(1, stop, -one)
        gap = (gap - (sums.gather(1, stop) - sums.gather(1, at))).clamp(min=0)
        over = gap - padded.gather(1, stop)
        tried = edge.scatter_add(1, stop, one).scatter_add(1, stop + 1, -one)
        for left, made in ((gap, edge), (over, tried)):
            better = left.abs() < best.abs()
            best = torch.where(better, left, best)
            best_edge = torch.where(better, made, best_edge)
        at = stop
    return best[:, 0], best_edge.cumsum(-1)[:, :n].bool()


def best_swap(v_Nn: Tensor, gap_N: Tensor, side_Nn: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the one swap per row that brings the gap closest to 0.

    The last two keys must be zeros, one inside S and one outside: exchanged with one of
    them, a key moves alone.
    """
    place = torch.arange(v_Nn.shape[-1], device=v_Nn.device).expand_as(v_Nn)
    # The smallest key of S so far, and its place: sorted, so that it can be searched.
    inside = torch.where(side_Nn, v_Nn, torch.inf).cummin(-1).values
    where = torch.where(side_Nn, place, 0).cummax(-1).values
    wanted = v_Nn - gap_N[:, None]
    under = torch.searchsorted(-inside, -wanted).clamp(max=v_Nn.shape[-1] - 1)
    best, swap = gap_N.abs(), torch.zeros_like(side_Nn)
    for partner in (under, (under - 1).clamp(min=0)):
        miss = (inside.gather(1, partner) - wanted).abs()
        least, enter = torch.where(side_Nn, torch.inf, miss).min(-1, keepdim=True)
        leave = where.gather(1, partner.gather(1, enter))
        better = least[:, 0] < best
        pair = torch.zeros_like(side_Nn).scatter(1, enter, True).scatter(1, leave, True)
        swap = torch.where(better[:, None], pair, swap)
        best = torch.where(better, least[:, 0], best)
    signed = torch.where(side_Nn, -v_Nn, v_Nn)
    return gap_N - (signed * swap).sum(-1), side_Nn ^ swap


def improved(v_Nn: Tensor, gap_N: Tensor, side_Nn: Tensor) -> Tensor:
    """Return the sides after a few best swaps."""
    v_Nn = torch.nn.functional.pad(v_Nn, (0, 2))
    side_Nn = torch.nn.functional.pad(side_Nn, (0, 2))
    side_Nn[:, -2] = True
    for _ in range(_SWAPS):
        gap_N, side_Nn = best_swap(v_Nn, gap_N, side_Nn)
        side_Nn[:, -2], side_Nn[:, -1] = True, False  # two zeros: either way the same
    return side_Nn[:, :-2]


def vectorised(p_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (lower, upper, side): closed form, or fill and swaps below 1."""
    v_Nn, order = p_NK.sort(-1, descending=True)
    first = torch.zeros_like(v_Nn, dtype=torch.bool)
    first[:, 0] = True
    rest = exact_sum(v_Nn.masked_fill(first, 0))
    peaked = v_Nn[:, 0] >= rest
    gap, filled = largest_first(v_Nn, (v_Nn[:, 0] + rest) / 2)
    side = torch.where(peaked[:, None], first, improved(v_Nn, gap, filled))
    zero = torch.zeros_like(v_Nn)
    lower = theta(
        exact_sum(torch.where(side, v_Nn, zero)),
        exact_sum(torch.where(side, zero, v_Nn)),
    )
    upper = torch.where(peaked, lower, torch.ones_like(lower))
    return lower, upper, torch.zeros_like(side).scatter(1, order, side)


def intervals(p_NK: Tensor, mask_NK: Tensor | None, options: Options) -> Tensor:
    """Return (lower, upper) of every row; write the subsets into ``mask_NK`` if given.

    Arguments as in ``ladder.intervals``.
    """
    enough, off, _ = options
    p_NK = p_NK.to(torch.float64)
    sound = (p_NK >= 0).all(-1) & ((exact_sum(p_NK) - 1).abs() <= off)
    lower, upper, side = vectorised(p_NK)
    bounds_N2 = torch.stack([lower, upper], -1)
    bounds_N2[~sound] = torch.nan
    if mask_NK is not None:
        mask_NK.copy_(side & sound[:, None])
    open_N = sound & (upper - lower > 4 * enough**2)
    _finish(p_NK, mask_NK, bounds_N2, open_N.nonzero()[:, 0], options)
    return bounds_N2


def _finish(
    p_NK: Tensor,
    mask_NK: Tensor | None,
    bounds_N2: Tensor,
    which: Tensor,
    options: Options,
) -> None:
    """Close the remaining rows one by one, on the CPU."""
    if not len(which):
        return
    mask = np.zeros((len(which), p_NK.shape[-1]), np.uint8)
    found = intervals_on_cpu(p_NK[which].cpu().numpy(), mask, options)
    bounds_N2[which] = torch.from_numpy(found).to(bounds_N2.device)
    if mask_NK is not None:
        mask_NK[which] = torch.from_numpy(mask).to(mask_NK.device)
