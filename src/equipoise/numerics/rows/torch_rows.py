"""Statistics of rows in torch: for every device but the CPU, and where numba is absent.

Axes, in this file:  N row · K key · m dealt key · s subset of the dealt keys but the
first · c candidate · C column.

Three passes over the keys, none of which waits for the host: the largest key of each
group of keys; exponentials and their sums; the running sum of what is left. θ needs no
sort. The largest keys are dealt in all 2⁹ ways, the largest always inside S. If one of
them alone or all others together cannot reach half of the mass, the best deal is
proven. Otherwise each of the deals that leave about half of the others to be taken is
completed by a run of them, found in the running sum by binary search: runs start at
several places, so that some end is near. A run is a real subset, so ``lower`` is
attained. Rows of few keys are also completed by every subset of the next six, with all
others or none: of up to 15 keys that is every subset. Rows that stay open keep 1 as
``upper``.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.numerics.rows.ladder import Options
from equipoise.numerics.rows.ladder import intervals as intervals_on_cpu

_DEALT, _NEXT = 10, 6
# Keys of one group are that many apart: neighbours are often large together.
_GROUPS = 256
# Deals tried, and starts of runs: rows of few keys need more of either.
_MANY, _FEW, _SHORT = (64, 8), (32, 4), 512
# Largest relative errors, in units of rounding: an exponential is off by a unit in its
# last place and by the rounding of its exponent, which grows with the exponent.
_EXPONENTIAL = 4


class Split(NamedTuple):
    """A subset S of each row's keys, and what is known of it."""

    inside_N: Tensor
    outside_N: Tensor
    proven_N: Tensor
    """No subset is nearer to half of the mass."""
    place_Nm: Tensor
    taken_Nm: Tensor
    """The dealt keys, and which of them are in S."""
    begin_N: Tensor
    end_N: Tensor
    """Of the other keys those from ``begin`` up to ``end`` are in S."""

    def witness(self, K: int) -> Tensor:
        """Return S as a mask of (N, K)."""
        at_K = torch.arange(K, device=self.begin_N.device)
        run_NK = (at_K >= self.begin_N[:, None]) & (at_K < self.end_N[:, None])
        return run_NK.scatter(1, self.place_Nm, self.taken_Nm)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums that are small tensors."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def largest(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return some of the largest entries of each row, falling, and their places.

    Of rows of few keys these are up to sixteen. Long rows are asked for the largest
    entry of each group of keys: then the first of ten is the largest of all, and those
    after it are among the largest.
    """
    N, K = x_NK.shape
    depth = K // _GROUPS
    if depth < 2:
        found = x_NK.topk(min(_DEALT + _NEXT, K), -1)
        return found.values, found.indices
    tail = depth * _GROUPS
    x_Nc, row_Nc = x_NK[:, :tail].view(N, depth, _GROUPS).max(1)
    at_K = torch.arange(K, device=x_NK.device)
    place_Nc = torch.cat(
        (row_Nc * _GROUPS + at_K[:_GROUPS], at_K[tail:].expand(N, -1)), 1
    )
    found = torch.cat((x_Nc, x_NK[:, tail:]), 1).topk(_DEALT, -1)
    return found.values, place_Nc.gather(1, found.indices)


def subset_sums(v_Nm: Tensor) -> Tensor:
    """Return the sums of all subsets of few keys; bit i of the place is key i."""
    sums_Ns = v_Nm.new_zeros(len(v_Nm), 1)
    for v_N in v_Nm.unbind(-1):
        sums_Ns = torch.cat((sums_Ns, sums_Ns + v_N[:, None]), 1)
    return sums_Ns


def split(w_NK: Tensor, v_Nm: Tensor, place_Nm: Tensor) -> Split:
    """Return a subset of nearly half of the mass; ``w_NK`` is used up.

    ``v_Nm`` and ``place_Nm`` are the values and places of each row's largest keys.
    """
    wide_Nm = v_Nm.to(_wide(w_NK))
    found = _dealt(w_NK, wide_Nm[:, :_DEALT], place_Nm[:, :_DEALT])
    if v_Nm.shape[1] <= _DEALT:
        return found
    return _nearer(found, wide_Nm, place_Nm, w_NK.shape[1])


def _dealt(w_NK: Tensor, v_Nm: Tensor, place_Nm: Tensor) -> Split:
    """Return a deal of the largest keys, completed by a run of others."""
    w_NK.scatter_(1, place_Nm, 0.0)
    first_N, others_N = v_Nm[:, 0], v_Nm[:, 1:].sum(-1)
    rest_N = w_NK.sum(-1, dtype=v_Nm.dtype)
    half_N = (first_N + others_N + rest_N) / 2
    sums_Ns = subset_sums(v_Nm[:, 1:])
    centre_N = half_N - rest_N / 2 - first_N
    deals, starts = _FEW if w_NK.shape[1] > _SHORT else _MANY
    near = (sums_Ns - centre_N[:, None]).abs_()
    deal_Nc = near.topk(min(deals, near.shape[1]), -1, largest=False).indices
    dealt_Nc = sums_Ns.gather(1, deal_Nc)
    missing_Nc = half_N[:, None] - first_N[:, None] - dealt_Nc
    over_N = missing_Nc[:, 0] <= 0
    proven_N = over_N | (missing_Nc[:, 0] >= rest_N)
    which_N, begin_N, end_N, filled_N = _run(w_NK, missing_Nc, rest_N, starts)
    which_N = which_N.masked_fill(proven_N, 0)[:, None]
    dealt_N = dealt_Nc.gather(1, which_N)[:, 0]
    filled_N = torch.where(proven_N, rest_N * ~over_N, filled_N)
    deal_N1 = deal_Nc.gather(1, which_N)
    taken_Nm = torch.cat(
        (torch.ones_like(over_N)[:, None], _bits(deal_N1, v_Nm.shape[1] - 1)), 1
    )
    whole_N = torch.full_like(end_N, w_NK.shape[1]) * ~over_N
    return Split(
        first_N + dealt_N + filled_N,
        (others_N - dealt_N) + (rest_N - filled_N),
        proven_N,
        place_Nm,
        taken_Nm,
        begin_N.masked_fill(proven_N, 0),
        torch.where(proven_N, whole_N, end_N),
    )


def _nearer(found: Split, v_Nm: Tensor, place_Nm: Tensor, K: int) -> Split:
    """Return the split, or a nearer one by the next keys and all others or none."""
    total_N = found.inside_N + found.outside_N
    dealt_Nm, next_Nm = v_Nm[:, 1:_DEALT], v_Nm[:, _DEALT:]
    # The smallest is nothing, or there are no more: every key is dealt or next.
    every_N = (v_Nm[:, -1] == 0) | (v_Nm.shape[1] == K)
    others_N = (total_N - v_Nm.sum(-1)).clamp(min=0) * ~every_N
    some_Nf = subset_sums(next_Nm)
    some_Nf = torch.cat((some_Nf, some_Nf + others_N[:, None]), 1)
    sums_Ns, deal_Ns = _rising_sums(dealt_Nm)
    goal_Nf = (total_N / 2 - v_Nm[:, 0])[:, None] - some_Nf
    after_Nf = torch.searchsorted(sums_Ns, goal_Nf).clamp(max=sums_Ns.shape[1] - 1)
    ends_N2f = torch.cat((after_Nf, (after_Nf - 1).clamp(min=0)), 1)
    off_N2f = (goal_Nf.repeat(1, 2) - sums_Ns.gather(1, ends_N2f)).abs_()
    best_N1 = off_N2f.argmin(-1, keepdim=True)
    at_N1 = ends_N2f.gather(1, best_N1)
    taken_N1 = best_N1 % some_Nf.shape[1]
    inside_N1 = v_Nm[:, :1] + sums_Ns.gather(1, at_N1) + some_Nf.gather(1, taken_N1)
    far_N = (found.inside_N - found.outside_N).abs() / 2
    near_N = every_N | (off_N2f.gather(1, best_N1)[:, 0] <= far_N)
    nearer_N = near_N & ~found.proven_N
    with_others_N = (taken_N1 >= some_Nf.shape[1] // 2)[:, 0]
    return _either(
        nearer_N,
        Split(
            inside_N1[:, 0],
            total_N - inside_N1[:, 0],
            every_N,
            place_Nm,
            torch.cat(
                (
                    torch.ones_like(at_N1, dtype=torch.bool),
                    _bits(deal_Ns.gather(1, at_N1), dealt_Nm.shape[1]),
                    _bits(taken_N1, next_Nm.shape[1]),
                ),
                1,
            ),
            torch.zeros_like(found.begin_N),
            K * with_others_N.to(found.end_N.dtype),
        ),
        found,
    )


def _rising_sums(v_Nm: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ``subset_sums`` from the smallest on, and their places there.

    Sums without a key and with it are both in order: they are merged, not sorted.
    """
    sums_Ns = v_Nm.new_zeros(len(v_Nm), 1)
    deal_Ns = torch.zeros_like(sums_Ns, dtype=torch.long)
    for i, v_N in enumerate(v_Nm.unbind(-1)):
        more_Ns, at_s = sums_Ns + v_N[:, None], torch.arange(1 << i, device=v_N.device)
        place_Ns = torch.cat(
            (
                at_s + torch.searchsorted(more_Ns, sums_Ns),
                at_s + torch.searchsorted(sums_Ns, more_Ns, right=True),
            ),
            1,
        )
        both_Ns = torch.cat((sums_Ns, more_Ns), 1)
        deal_Ns = torch.cat((deal_Ns, deal_Ns + (1 << i)), 1)
        sums_Ns = torch.zeros_like(both_Ns).scatter(1, place_Ns, both_Ns)
        deal_Ns = torch.zeros_like(deal_Ns).scatter(1, place_Ns, deal_Ns)
    return sums_Ns, deal_Ns


def _either(which_N: Tensor, one: Split, other: Split) -> Split:
    """Return each row's split: the one where so marked, else the other."""
    next_Nm = one.place_Nm[:, _DEALT:]
    in_run_Nm = (next_Nm >= other.begin_N[:, None]) & (next_Nm < other.end_N[:, None])
    taken_Nm = torch.cat((other.taken_Nm, in_run_Nm), 1)
    other = other._replace(place_Nm=one.place_Nm, taken_Nm=taken_Nm)
    return Split(
        *(
            torch.where(which_N if x.ndim == 1 else which_N[:, None], x, y)
            for x, y in zip(one, other, strict=True)
        )
    )


def _bits(deal_N1: Tensor, count: int) -> Tensor:
    return (deal_N1 >> torch.arange(count, device=deal_N1.device)) % 2 == 1


def _run(
    w_NK: Tensor, missing_Nc: Tensor, rest_N: Tensor, starts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which deal a run of keys completes best, where the run is, and its mass.

    Runs start where 0, 1/2S, … of the mass of all keys is passed.
    """
    sum_NK = w_NK.cumsum(-1)
    share_S = torch.arange(starts, device=w_NK.device) / (2 * starts)
    begin_NS = torch.searchsorted(sum_NK, (rest_N[:, None] * share_S).to(w_NK.dtype))
    begin_NS = (begin_NS + 1).clamp(max=w_NK.shape[1]) * (share_S > 0)
    before_NS = _before(sum_NK, begin_NS)
    goal_NcS = missing_Nc[:, :, None] + before_NS[:, None].to(missing_Nc.dtype)
    end_NcS = torch.searchsorted(
        sum_NK, goal_NcS.flatten(1).to(w_NK.dtype), right=True
    ).view_as(goal_NcS)
    ends = torch.stack((end_NcS, (end_NcS + 1).clamp(max=w_NK.shape[1])))
    ends = torch.maximum(ends, begin_NS[:, None]).transpose(0, 1)
    upto = _before(sum_NK, ends.flatten(1)).view(ends.shape)
    off = (goal_NcS[:, None] - upto).abs_().flatten(1).argmin(-1, keepdim=True)
    found = off % (missing_Nc.shape[1] * starts)
    start_N1 = found % starts
    mass_N1 = upto.flatten(1).gather(1, off) - before_NS.gather(1, start_N1)
    begin_N1, end_N1 = begin_NS.gather(1, start_N1), ends.flatten(1).gather(1, off)
    which_N1 = found // starts
    filled = mass_N1.to(missing_Nc.dtype)
    return which_N1[:, 0], begin_N1[:, 0], end_N1[:, 0], filled[:, 0]


def _before(sum_NK: Tensor, place: Tensor) -> Tensor:
    """Return the mass of the keys before each place."""
    return sum_NK.gather(1, (place - 1).clamp(min=0)) * (place > 0)


def theta(inside: Tensor, outside: Tensor) -> Tensor:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    near = 1 - ((inside - outside) / total) ** 2
    far = 4 * (inside / total) * (outside / total)
    return torch.where(4 * torch.minimum(inside, outside) > total, near, far)


def bounds(found: Split, *, mean_N: Tensor, unit: float, K: int) -> Tensor:
    """Return (lower, upper) of each row, (2, N), rounding of exponentials included.

    Args:
        found: A subset of each row.
        mean_N: The mean of |exponent| under the row's masses.
        unit: Half a unit in the last place at 1, of the exponentials.
        K: How many keys the running sum has.
    """
    total_N = found.inside_N + found.outside_N
    gap_N = ((found.inside_N - found.outside_N) / (2 * total_N)).abs()
    value_N = theta(found.inside_N, found.outside_N)
    margin_N = 8 * unit * gap_N * (mean_N + _EXPONENTIAL * value_N)
    # The running sum is rounded at every level of a tree, or every 256 keys or so.
    summed = _EXPONENTIAL + 2 * math.log2(K + 1) + K / 256
    away_N = gap_N + unit * (mean_N + summed)
    lower_N = torch.where(found.proven_N, value_N - margin_N, 1 - 4 * away_N**2)
    upper_N = torch.where(found.proven_N, value_N + margin_N, torch.ones_like(value_N))
    return torch.stack((lower_N, upper_N)).clamp(0, 1)


def _few_equal(visible_N: Tensor, p_max_N: Tensor) -> Tensor:
    """Return an upper bound: of S and the rest, one has at most half of the keys."""
    short_N = 0.5 - (visible_N // 2) * p_max_N * (1 + 2.0**-20)
    return 1 - 4 * short_N.clamp(min=0) ** 2


def columns(z_NK: Tensor) -> Tensor:
    """Return the nine columns of ``statistics.row_columns``, (C, N), of z's dtype."""
    finfo = torch.finfo(z_NK.dtype)
    z_Nm, place_Nm = largest(z_NK)
    top_N = z_Nm[:, 0]
    shift_N = top_N.masked_fill(top_N == -math.inf, 0.0)[:, None]
    # Below the floor the exponential is 0: masked keys have none, and no infinity.
    floor = math.log(finfo.smallest_normal * finfo.eps) - 1
    d_NK = (z_NK - shift_N).clamp_(min=floor)
    e_NK = d_NK.exp()
    first_N = (e_NK * d_NK).sum(-1)
    squares_N = e_NK.square().sum(-1)
    sink_N = e_NK[:, 0].clone()
    found = split(e_NK, (z_Nm - shift_N).clamp(min=floor).exp(), place_Nm)
    mass_N = found.inside_N + found.outside_N
    hidden_NK = z_NK == -math.inf
    visible_N = z_NK.shape[1] - hidden_NK.sum(-1)
    scores_N = z_NK.masked_fill(hidden_NK, 0.0).square_().sum(-1)
    mean_N = -first_N / mass_N
    theta_2N = bounds(found, mean_N=mean_N, unit=finfo.eps / 2, K=z_NK.shape[1])
    upper_N = torch.minimum(theta_2N[1], _few_equal(visible_N, 1 / mass_N))
    upper_N = torch.maximum(upper_N, theta_2N[0])
    below, above = _outward(theta_2N[0], upper_N, z_NK.dtype)
    rows = (mass_N.log() + mean_N, sink_N / mass_N, 1 / mass_N)
    entropy_N, sink_N, p_max_N = (x.to(z_NK.dtype) for x in rows)
    masses_N = (squares_N / mass_N**2).to(z_NK.dtype)
    read = (below, above, top_N, entropy_N.clamp(min=0), sink_N, p_max_N, scores_N)
    return _without_keys((*read, masses_N), visible_N)


def _without_keys(read: tuple[Tensor, ...], visible_N: Tensor) -> Tensor:
    """Return all columns; those of a row without keys are 0, its largest logit -inf."""
    read_CN = torch.stack(read).masked_fill(visible_N == 0, 0.0)
    read_CN[2].masked_fill_(visible_N == 0, -math.inf)
    return torch.cat((read_CN, visible_N[None].to(read_CN.dtype)))


def _outward(lower: Tensor, upper: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return lower rounded down and upper rounded up, NaN where either is."""
    low, high = lower.to(dtype), upper.to(dtype)
    down = torch.nextafter(low, torch.zeros_like(low))
    up = torch.nextafter(high, torch.ones_like(high))
    return torch.where(low > lower, down, low), torch.where(high < upper, up, high)


def vectorised(p_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (lower, upper, side) of rows of masses: no rounding is added."""
    found = split(p_NK.clone(), *largest(p_NK))
    lower_N = theta(found.inside_N, found.outside_N)
    upper_N = torch.where(found.proven_N, lower_N, torch.ones_like(lower_N))
    return lower_N, upper_N, found.witness(p_NK.shape[1])


def intervals(p_NK: Tensor, mask_NK: Tensor | None, options: Options) -> Tensor:
    """Return (lower, upper) of every row; write the subsets into ``mask_NK`` if given.

    Arguments as in ``ladder.intervals``. Rows left open are closed on the CPU, so this
    waits for the device; ``columns`` does not.
    """
    enough, off, _ = options
    p_NK = p_NK.to(torch.float64)
    sound_N = (p_NK >= 0).all(-1) & ((p_NK.sum(-1) - 1).abs() <= off)
    lower_N, upper_N, side_NK = vectorised(p_NK)
    bounds_N2 = torch.stack((lower_N, upper_N), -1)
    bounds_N2.masked_fill_(~sound_N[:, None], torch.nan)
    if mask_NK is not None:
        mask_NK.copy_(side_NK & sound_N[:, None])
    open_N = sound_N & (upper_N - lower_N > 4 * enough**2)
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
