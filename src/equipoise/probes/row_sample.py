"""Which queries of a long attention call are read, and how far off that may leave θ.

Axes, in this file:  B batch · H head · Q query · n chosen query · N row, of all
sequences · C column · b, h, q, k the part of one piece.

Of Q queries n are read: the first n/8, which see few keys and differ most, and one of
each of the other 7n/8 parts of nearly one size, which counts for all of its part. A
hash of step, site and part chooses, so that every rank chooses the same, a resumed run
does so again, and no generator is drawn from. All heads and sequences share the choice:
however a batch is spread over ranks, the same rows are read.

One query of a part says nothing about the spread within it, so the error comes from
differences between neighbours (successive differences; Wolter, 2007, ch. 8), and that
of a quantile from the error of the share of rows below it (Woodruff, 1952). Rows that
are rare may all be missed, and then no difference shows them: to the variance of the
mean is added what half a row at the far end of θ's range would add (as Agresti and
Coull, 1998, add rows to a share).
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from equipoise.anatomy.calls import PIECE_QUERIES, AttentionCall, Where
from equipoise.numerics.compiled import to_device
from equipoise.numerics.rows.sinks import key_columns
from equipoise.numerics.rows.statistics import MAX_LOGIT, SINK, TOP_MASS

# Standard errors on either side: 95 % of intervals hold what all rows give.
_WIDTH = 1.96
# θ of a row is known to so much; readings that differ by less are the same.
_KNOWN = 1e-6
# Rows of the far end of the range that a sample is taken to have missed.
_UNSEEN = 0.5


# One in so many of the rows that are read is one of the first.
_FIRST = 8


def chosen_queries(
    queries: int, rows: int, *, step: int, site: str
) -> Int[Tensor, " n"]:
    """Return which queries of a step are read, ascending, on the CPU.

    >>> chosen_queries(24, 8, step=0, site="layer.0").tolist()
    [0, 2, 6, 7, 10, 16, 19, 21]
    """
    edge_n = _edges(queries, rows)
    drawn = hashlib.shake_256(f"{step} {site}".encode()).digest(8 * rows)
    place_n = np.frombuffer(drawn, "<u8") % np.diff(edge_n).astype(np.uint64)
    return torch.from_numpy(edge_n[:-1] + place_n.astype(np.int64))


def query_weights(queries: int, rows: int) -> Float[Tensor, " n"]:
    """Return of how many queries each chosen one is the sample.

    >>> query_weights(24, 8).tolist()
    [1.0, 3.0, 3.0, 3.0, 4.0, 3.0, 3.0, 4.0]
    """
    return torch.from_numpy(np.diff(_edges(queries, rows))).float()


def _edges(queries: int, rows: int) -> NDArray[np.int64]:
    first = rows // _FIRST
    parts = rows - first
    others = first + np.arange(parts + 1) * (queries - first) // parts
    return np.concatenate([np.arange(first), others])


def sampled_columns(
    call: AttentionCall, chosen_n: Int[Tensor, " n"]
) -> Float[Tensor, "C H B n"]:
    """Return the statistics of the chosen rows; see ``key_columns``."""
    B, H, _, _ = call.shape
    columns_CHBn: Tensor | None = None
    first_BQ = call.first_key_BQ()
    for where, scores_bhqk in _pieces(call, chosen_n):
        read_Cbhq = key_columns(scores_bhqk, sinks=call.sinks)
        if first_BQ is not None:
            first_Bn = rows_of(first_BQ, chosen_n)
            read_sink(read_Cbhq, scores_bhqk, first_Bn[where.sequences, where.queries])
        if columns_CHBn is None:
            columns_CHBn = read_Cbhq.new_empty(len(read_Cbhq), H, B, len(chosen_n))
        columns_CHBn.transpose(1, 2)[:, *where] = read_Cbhq
    assert columns_CHBn is not None
    return columns_CHBn


def rows_of(
    x_BQ: Int[Tensor, "B Q"] | Bool[Tensor, "B Q"], chosen_n: Int[Tensor, " n"]
) -> Tensor:
    """Return x of the chosen queries, without waiting for the device it is on."""
    return x_BQ[:, to_device(chosen_n, x_BQ.device)]


def read_sink(
    read_Cbhq: Float[Tensor, "C b h q"],
    scores_bhqk: Float[Tensor, "b h q k"],
    first_bq: Int[Tensor, "b q"],
) -> None:
    """Replace the mass of key 0 by that of the first key of each row's sequence.

    p = p_max·exp(z - z_max): no row is normalised again.
    """
    b, h, q, k = scores_bhqk.shape
    at_bhq1 = first_bq.clamp(max=k - 1)[:, None, :, None].expand(b, h, q, 1)
    z_bhq = scores_bhqk.gather(-1, at_bhq1)[..., 0]
    below_bhq = z_bhq - read_Cbhq[MAX_LOGIT]
    read_Cbhq[SINK] = read_Cbhq[TOP_MASS] * below_bhq.exp()


def _pieces(
    call: AttentionCall, chosen_n: Int[Tensor, " n"]
) -> Iterator[tuple[Where, Tensor]]:
    """Yield (where, scores_bhqk) of the chosen queries; what is hidden reads -inf."""
    for start in range(0, len(chosen_n), PIECE_QUERIES):
        some_q = chosen_n[start : start + PIECE_QUERIES]
        for where, scores_bhqk in _only(call, some_q).pieces():
            if call.causal:
                device = scores_bhqk.device
                key_k = torch.arange(scores_bhqk.shape[-1], device=device)
                future_qk = key_k > to_device(some_q[where.queries], device)[:, None]
                scores_bhqk = scores_bhqk.masked_fill_(future_qk, -math.inf)
            first, last = where.queries.start + start, where.queries.stop + start
            yield where._replace(queries=slice(first, last)), scores_bhqk


def _only(call: AttentionCall, some_q: Int[Tensor, " q"]) -> AttentionCall:
    """Return the call of some queries; a causal mask is left to the caller."""
    keys = min(int(some_q[-1]) + 1, call.shape[3]) if call.causal else call.shape[3]

    def rows(x: Tensor | None) -> Tensor | None:
        if x is None or x.ndim < 2 or x.shape[-2] == 1:
            return x
        return x.detach()[..., to_device(some_q, x.device), :]

    def modify(scores_bhqk: Tensor, where: Where, i_q: Tensor) -> Tensor:
        assert call.modify is not None
        return call.modify(scores_bhqk, where, to_device(some_q, i_q.device)[i_q])

    scores, mask = rows(call.scores_BHQK), rows(call.mask)
    return replace(
        call,
        q_BHQD=rows(call.q_BHQD),
        k_BGKD=None if call.k_BGKD is None else call.k_BGKD.detach()[:, :, :keys],
        v_BGKD=None,
        scores_BHQK=None if scores is None else scores[..., :keys],
        mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., :keys],
        causal=False,
        modify=None if call.modify is None else modify,
    )


class _Ranked(NamedTuple):
    """Values in order, and their places among all rows that they stand for."""

    value_HN: Tensor
    place_HN: Tensor
    total_H1: Tensor
    known_H1: Tensor

    def around(self, level_Hq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values below and above levels from 0 to 1, and how far between."""
        wanted_Hq = level_Hq.clamp(0, 1) * (self.total_H1 - 1)
        after_Hq = torch.searchsorted(self.place_HN, wanted_Hq)
        last_H1 = (self.known_H1 - 1).clamp(min=0)
        high_Hq = torch.minimum(after_Hq, last_H1)
        low_Hq = torch.minimum((after_Hq - 1).clamp(min=0), last_H1)
        begin_Hq, end_Hq = (self.place_HN.gather(1, x) for x in (low_Hq, high_Hq))
        part_Hq = (wanted_Hq - begin_Hq) / (end_Hq - begin_Hq).clamp(min=1e-9)
        low, high = (self.value_HN.gather(1, x) for x in (low_Hq, high_Hq))
        return low, high, part_Hq.clamp(0, 1).to(low.dtype)

    def at(self, level_Hq: Tensor) -> Tensor:
        """Return the values at levels from 0 to 1, linear between two places."""
        return torch.lerp(*self.around(level_Hq))


def _ranked(x_HN: Tensor, weight_N: Tensor) -> _Ranked:
    value_HN, order_HN = x_HN.sort(-1)  # NaN last
    known_HN = ~value_HN.isnan()
    weight_HN = weight_N.double()[order_HN] * known_HN
    upto_HN = weight_HN.cumsum(-1)
    place_HN = upto_HN - (weight_HN + 1) / 2  # the middle of what a row stands for
    return _Ranked(value_HN, place_HN, upto_HN[:, -1:], known_HN.sum(-1, keepdim=True))


def weighted_quantiles(
    x_HN: Float[Tensor, "H N"], weight_N: Float[Tensor, " N"], at: Sequence[float]
) -> Float[Tensor, "q H"]:
    """Return quantiles of all rows that some stand for, NaN left out.

    With weights of 1 they are ``nan_quantiles``.

    >>> weighted_quantiles(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 3.0]), [0.5])
    tensor([[2.5000]])
    """
    level_q = to_device(torch.tensor(at, dtype=torch.float64), x_HN.device)
    return _ranked(x_HN, weight_N).at(level_q.expand(len(x_HN), -1)).T


def weighted_mean(
    x_HN: Float[Tensor, "H N"], weight_N: Float[Tensor, " N"]
) -> Float[Tensor, " H"]:
    """Return the mean over all rows that some stand for, NaN left out.

    >>> weighted_mean(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([1.0, 3, 9]))
    tensor([2.5000])
    """
    known_HN = (~x_HN.isnan()).to(x_HN.dtype)
    return (x_HN.nan_to_num(0.0) @ weight_N) / (known_HN @ weight_N)


def sampling_errors(
    theta_HBn: Float[Tensor, "H B n"],
    weight_n: Float[Tensor, " n"],
    *,
    at: dict[str, float],
) -> dict[str, Float[Tensor, " H"]]:
    """Return half of the 95 % interval of the mean and of quantiles, per head.

    Args:
        theta_HBn: θ of the chosen rows in order; NaN where a row does not count.
        weight_n: What ``query_weights`` gives.
        at: Names and levels of the quantiles.
    """
    known_HBn = ~theta_HBn.isnan()
    ranked = _ranked(theta_HBn.flatten(1), weight_n.repeat(theta_HBn.shape[1]))
    mean_H = torch.hypot(_error(theta_HBn, weight_n), _unseen(theta_HBn, weight_n))
    found = {"mean": mean_H + _KNOWN}
    for name, level in at.items():
        level_H1 = torch.full_like(ranked.total_H1, level)
        value_H1 = ranked.at(level_H1)
        below_HBn = (theta_HBn <= value_H1[..., None]).to(theta_HBn.dtype)
        share_H = _error(below_HBn.where(known_HBn, torch.nan), weight_n)
        # A share moves in steps of one row's weight: half of one on either side.
        off_H1 = share_H[:, None].double() + weight_n.amax() / (2 * ranked.total_H1)
        low_H1, _, _ = ranked.around(level_H1 - off_H1)
        _, high_H1, _ = ranked.around(level_H1 + off_H1)
        found[name] = (high_H1 - low_H1)[:, 0] / 2 + _KNOWN
    return found


def _unseen(theta_HBn: Tensor, weight_n: Tensor) -> Tensor:
    """Return half of the interval that rows not seen at all would leave of a mean."""
    weight_N = weight_n.repeat(theta_HBn.shape[1])
    mean_H = weighted_mean(theta_HBn.flatten(1), weight_N)
    total_H = (~theta_HBn.isnan()).to(weight_N.dtype).flatten(1) @ weight_N
    spread = (weight_n * (weight_n - 1)).amax().sqrt()
    return _WIDTH * _UNSEEN * spread * torch.maximum(mean_H, 1 - mean_H) / total_H


def _error(y_HBn: Tensor, weight_n: Tensor) -> Tensor:
    """Return half of the 95 % interval of a mean over rows, NaN left out.

    A part of w rows of which one is read adds w²(1 - 1/w) times their variance.
    """
    n = y_HBn.shape[-1]
    known_HBn = ~y_HBn.isnan()
    mean_H = weighted_mean(y_HBn.flatten(1), weight_n.repeat(y_HBn.shape[1]))
    off_HBn = (y_HBn - mean_H[:, None, None]).where(known_HBn, 0.0)
    # Differences first, then weights: weights that change by one row would turn what
    # lies above or below the mean into a difference.
    square_n = (weight_n * (weight_n - 1))[n // _FIRST :]
    step_Hn = off_HBn.sum(1)[:, n // _FIRST :].diff(dim=-1)
    parts = step_Hn.shape[-1] + 1
    between_n = (square_n[1:] + square_n[:-1]) / 2
    square_H = (step_Hn.square() @ between_n) * (parts / (2 * max(parts - 1, 1)))
    total_H = (known_HBn * weight_n).sum((1, 2))
    error_H: Tensor = _WIDTH * square_H.sqrt() / total_H
    return error_H
