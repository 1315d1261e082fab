"""Statistics of rows in torch: for every device but the CPU, and where numba is absent.

Axes, in this file:  N row · K key · m large key · s subset of dealt keys · f part of
the others · c, r candidate deal and start of a run · C column.

Three passes over the keys, none of which waits for the host: the largest key of each
group of keys; exponentials and their sums; the running sum of what is left. θ needs no
sort. The largest key is inside S, and the next eight are dealt in all 2⁸ ways. If none
of the deals leaves more than nothing and less than all of the other keys to be taken,
the best is proven. A deal is completed by every subset of the next seven keys, with all
others or none: of up to 16 keys that is every subset; or by a run of the others, found
in the running sum by binary search: runs start at several places, so that some end is
near. Each is a real subset, so ``lower`` is attained. Rows that stay open keep 1 as
``upper``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_DEALT, _NEXT = 9, 7
# Keys of one group are that many apart: neighbours are often large together.
_GROUPS = 256
# Deals that are completed by runs, and starts of these.
_DEALS, _STARTS = 32, 8
# Largest relative errors, in units of rounding: an exponential is off by a unit in its
# last place and by the rounding of its exponent, which grows with the exponent.
_EXPONENTIAL = 4


class RowSplit(NamedTuple):
    """The mass of a subset S of each row's keys, and what is known of it."""

    inside_N: Tensor
    outside_N: Tensor
    proven_N: Tensor
    """No subset is nearer to half of the mass."""


def largest(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return up to sixteen of the largest entries of each row, falling, and places.

    Long rows are asked for the largest entry of each group of keys: then the first is
    the largest of all, and those after it are among the largest.
    """
    N, K = x_NK.shape
    depth = K // _GROUPS
    if depth < 2:
        found = x_NK.topk(min(_DEALT + _NEXT, K), -1)
        return found.values, found.indices
    tail = depth * _GROUPS
    x_Nm, row_Nm = x_NK[:, :tail].view(N, depth, _GROUPS).max(1)
    at_K = torch.arange(K, device=x_NK.device)
    place_Nm = torch.cat(
        (row_Nm * _GROUPS + at_K[:_GROUPS], at_K[tail:].expand(N, -1)), 1
    )
    found = torch.cat((x_Nm, x_NK[:, tail:]), 1).topk(_DEALT + _NEXT, -1)
    return found.values, place_Nm.gather(1, found.indices)


def subset_sums(v_Nm: Tensor) -> Tensor:
    """Return the sums of all subsets of few keys, rising.

    Sums without a key and with it are both in order: they are merged, not sorted.
    """
    sums_Ns = v_Nm.new_zeros(len(v_Nm), 1)
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
        sums_Ns = torch.zeros_like(both_Ns).scatter(1, place_Ns, both_Ns)
    return sums_Ns


def _nearest(sums_Ns: Tensor, goal_Nf: Tensor) -> Tensor:
    """Return the nearest of some rising sums to each goal."""
    after_Nf = torch.searchsorted(sums_Ns, goal_Nf).clamp(max=sums_Ns.shape[1] - 1)
    above_Nf = sums_Ns.gather(1, after_Nf)
    below_Nf = sums_Ns.gather(1, (after_Nf - 1).clamp(min=0))
    return torch.where(above_Nf - goal_Nf < goal_Nf - below_Nf, above_Nf, below_Nf)


def split(w_NK: Tensor, v_Nm: Tensor, place_Nm: Tensor) -> RowSplit:
    """Return a subset of nearly half of the mass; ``w_NK`` is used up.

    ``v_Nm`` and ``place_Nm`` are values and places of each row's largest keys. To the
    largest a deal and a part of the others are added, which should be ``goal_N1``.
    """
    # Small tensors: their sums may be wide.
    wide = torch.float32 if w_NK.device.type == "mps" else torch.float64
    v_Nm = v_Nm.to(wide)
    w_NK.scatter_(1, place_Nm[:, :_DEALT], 0.0)
    sums_Ns, next_Nf = subset_sums(v_Nm[:, 1:_DEALT]), subset_sums(v_Nm[:, _DEALT:])
    first_N1, dealt_N1 = v_Nm[:, :1], sums_Ns[:, -1:]
    rest_N1 = w_NK.sum(-1, keepdim=True, dtype=wide)
    goal_N1 = (dealt_N1 + rest_N1 - first_N1) / 2
    every_N1 = ((v_Nm[:, _DEALT:] > 0).sum(-1) == (w_NK > 0).sum(-1))[:, None]
    others_N1 = (rest_N1 - next_Nf[:, -1:]).clamp(min=0) * ~every_N1
    some_Nf = torch.cat((next_Nf, next_Nf + others_N1), 1)
    deal_Nc, run_Nc = _runs(w_NK, sums_Ns, goal_N1=goal_N1, rest_N1=rest_N1)
    deal_Nc = torch.cat((_nearest(sums_Ns, goal_N1 - some_Nf), deal_Nc), 1)
    part_Nc = torch.cat((some_Nf, run_Nc), 1)
    best_N1 = (goal_N1 - deal_Nc - part_Nc).abs_().argmin(-1, keepdim=True)
    deal_N1, part_N1 = deal_Nc.gather(1, best_N1), part_Nc.gather(1, best_N1)
    begin_N1 = torch.searchsorted(sums_Ns, goal_N1 - rest_N1, right=True)
    none_N1 = begin_N1 >= torch.searchsorted(sums_Ns, goal_N1)
    return RowSplit(
        (first_N1 + deal_N1 + part_N1)[:, 0],
        ((dealt_N1 - deal_N1) + (rest_N1 - part_N1))[:, 0],
        (none_N1 | every_N1)[:, 0],
    )


def _runs(
    w_NK: Tensor, sums_Ns: Tensor, *, goal_N1: Tensor, rest_N1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the deals that leave half of the others, and a run of these for each.

    Runs start where 0, 1/2R, … of the mass of the others is passed.
    """
    count = min(_DEALS, sums_Ns.shape[1])
    begin_N1 = torch.searchsorted(sums_Ns, goal_N1 - rest_N1 / 2) - count // 2
    begin_N1 = begin_N1.clamp(0, sums_Ns.shape[1] - count)
    deal_Nc = sums_Ns.gather(1, begin_N1 + torch.arange(count, device=w_NK.device))
    running_NK = w_NK.cumsum(-1)
    share_r = torch.arange(_STARTS, device=w_NK.device) / (2 * _STARTS)
    passed_Nr = torch.searchsorted(running_NK, (rest_N1 * share_r).to(w_NK.dtype))
    before_Nr = running_NK.gather(1, passed_Nr.clamp(max=w_NK.shape[1] - 1))
    before_Nrc = (before_Nr * (share_r > 0)).repeat_interleave(count, 1)
    deal_Nrc = deal_Nc.repeat(1, _STARTS)
    goal_Nrc = (goal_N1 - deal_Nrc).to(w_NK.dtype) + before_Nrc
    until_Nrc = torch.maximum(_nearest(running_NK, goal_Nrc), before_Nrc)
    return deal_Nrc, (until_Nrc - before_Nrc).to(deal_Nrc.dtype)


def theta(inside: Tensor, outside: Tensor) -> Tensor:
    """Return 4ab/(a+b)², written 1 - ((a-b)/(a+b))² where that rounds less."""
    total = inside + outside
    near = 1 - ((inside - outside) / total) ** 2
    far = 4 * (inside / total) * (outside / total)
    return torch.where(4 * torch.minimum(inside, outside) > total, near, far)


def bounds(found: RowSplit, *, mean_N: Tensor, unit: float, K: int) -> Tensor:
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
    shift_N1 = top_N.masked_fill(top_N == -math.inf, 0.0)[:, None]
    # Below the floor the exponential is 0: masked keys have none, and no infinity.
    floor = math.log(finfo.smallest_normal * finfo.eps) - 1
    d_NK = (z_NK - shift_N1).clamp_(min=floor)
    e_NK = d_NK.exp()
    first_N = (e_NK * d_NK).sum(-1)
    squares_N = e_NK.square().sum(-1)
    sink_N = e_NK[:, 0].clone()
    hidden_NK = z_NK == -math.inf
    visible_N = z_NK.shape[1] - hidden_NK.sum(-1)
    scores_N = z_NK.masked_fill(hidden_NK, 0.0).square_().sum(-1)
    e_Nm = (z_Nm - shift_N1).clamp(min=floor).exp()
    found = split(e_NK, e_Nm, place_Nm)
    mass_N = found.inside_N + found.outside_N
    mean_N = -first_N / mass_N
    theta_2N = bounds(found, mean_N=mean_N, unit=finfo.eps / 2, K=z_NK.shape[1])
    upper_N = torch.minimum(theta_2N[1], _few_equal(visible_N, 1 / mass_N))
    upper_N = torch.maximum(upper_N, theta_2N[0])
    bounds_N2 = torch.stack((theta_2N[0], upper_N), -1)
    below, above = outward(bounds_N2, z_NK.dtype)
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


def outward(bounds_x2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return lower rounded down and upper rounded up to a dtype; NaN stays one."""
    lower, upper = bounds_x2.unbind(-1)
    low, high = lower.to(dtype), upper.to(dtype)
    down = torch.nextafter(low, torch.zeros_like(low))
    up = torch.nextafter(high, torch.ones_like(high))
    return torch.where(low > lower, down, low), torch.where(high < upper, up, high)
