"""Which queries of a long attention call are read, and how far off that may leave θ.

Axes, in this file:  B batch · H head · Q query · n chosen query · N row, of all
sequences · C column · b, h, q, k the part of one piece.

Of Q queries n are read, one from each of n parts of nearly one size. A hash of step,
site and part chooses, so that every rank chooses the same, a resumed run does so again,
and no generator is drawn from. All heads and sequences share the choice: however a
batch is spread over ranks, the same rows are read.

One query of a part says nothing about the spread within it, so the error comes from
differences between neighbours (successive differences; Wolter, 2007, ch. 8), and that
of a quantile from the error of the share of rows below it (Woodruff, 1952).
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise.anatomy.calls import PIECE_QUERIES, AttentionCall, Where, future_QK
from equipoise.numerics.rows.statistics import (
    COLUMNS,
    MAX_LOGIT,
    SINK,
    TOP_MASS,
    row_columns,
)

# Standard errors on either side: 95 % of intervals hold what all rows give.
_WIDTH = 1.96
_Rounding = Callable[[Tensor], Tensor]


def chosen_queries(
    queries: int, rows: int, *, step: int, site: str
) -> Int[Tensor, " n"]:
    """Return which queries of a step are read, ascending, on the CPU.

    >>> chosen_queries(6, 3, step=0, site="layer.0").tolist()
    [1, 2, 5]
    """
    edge_n = np.arange(rows + 1) * queries // rows
    drawn = hashlib.shake_256(f"{step} {site}".encode()).digest(8 * rows)
    place_n = np.frombuffer(drawn, "<u8") % np.diff(edge_n).astype(np.uint64)
    return torch.from_numpy(edge_n[:-1] + place_n.astype(np.int64))


def sampled_columns(
    call: AttentionCall, chosen_n: Int[Tensor, " n"]
) -> Float[Tensor, "C H B n"]:
    """Return the statistics of the chosen rows; see ``row_columns``."""
    B, H, _, _ = call.shape
    columns_CHBn: Tensor | None = None
    first_BQ = call.first_key_BQ()
    for where, scores_bhqk in _pieces(call, chosen_n):
        read_Cbhq = row_columns(scores_bhqk)
        if first_BQ is not None:
            first_Bn = first_BQ[:, chosen_n.to(first_BQ.device)]
            read_sink(read_Cbhq, scores_bhqk, first_Bn[where.sequences, where.queries])
        if columns_CHBn is None:
            columns_CHBn = read_Cbhq.new_empty(COLUMNS, H, B, len(chosen_n))
        columns_CHBn.transpose(1, 2)[:, *where] = read_Cbhq
    assert columns_CHBn is not None
    return columns_CHBn


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
                key_k = torch.arange(scores_bhqk.shape[-1])
                future_qk = key_k > some_q[where.queries, None]
                hidden = future_qk.to(scores_bhqk.device)
                scores_bhqk = scores_bhqk.masked_fill_(hidden, -math.inf)
            first, last = where.queries.start + start, where.queries.stop + start
            yield where._replace(queries=slice(first, last)), scores_bhqk


def _only(call: AttentionCall, some_q: Int[Tensor, " q"]) -> AttentionCall:
    """Return the call of some queries; a causal mask is left to the caller."""
    keys = min(int(some_q[-1]) + 1, call.shape[3]) if call.causal else call.shape[3]

    def rows(x: Tensor | None) -> Tensor | None:
        if x is None or x.ndim < 2 or x.shape[-2] == 1:
            return x
        return x.detach()[..., some_q.to(x.device), :]

    scores, mask = rows(call.scores_BHQK), rows(call.mask)
    return replace(
        call,
        q_BHQD=rows(call.q_BHQD),
        k_BGKD=None if call.k_BGKD is None else call.k_BGKD.detach()[:, :, :keys],
        v_BGKD=None,
        scores_BHQK=None if scores is None else scores[..., :keys],
        mask=mask if mask is None or mask.shape[-1] == 1 else mask[..., :keys],
        causal=False,
    )


def largest_logits(call: AttentionCall) -> Float[Tensor, "H B Q"]:
    """Return the largest score of every row, -inf where fewer than two are visible."""
    B, H, Q, _ = call.shape
    top_HBQ: Tensor | None = None
    for where, scores_bhqk in call.pieces():
        if call.causal:
            future_qk = future_QK(
                where.queries, scores_bhqk.shape[-1], device=scores_bhqk.device
            )
            first = where.queries.start  # every row of the piece sees the keys before
            scores_bhqk[..., first:].masked_fill_(future_qk[:, first:], -math.inf)
        few_bhq = _visible(call, where, scores_bhqk) < 2
        if top_HBQ is None:
            top_HBQ = scores_bhqk.new_empty(H, B, Q)
        top_bhq = scores_bhqk.amax(-1).masked_fill(few_bhq, -math.inf)
        top_HBQ.transpose(0, 1)[where] = top_bhq
    assert top_HBQ is not None
    return top_HBQ


def _visible(call: AttentionCall, where: Where, scores_bhqk: Tensor) -> Tensor:
    """Return how many keys each row sees; counted only where a mask decides."""
    if call.mask is not None or call.scores_BHQK is not None:
        return (scores_bhqk > -math.inf).sum(-1)
    keys = call.shape[3]
    if not call.causal:
        return torch.tensor(keys, device=scores_bhqk.device)
    last_q = torch.arange(where.queries.start, where.queries.stop)
    return (last_q + 1).clamp(max=keys).to(scores_bhqk.device)


def sampling_errors(
    theta_HBn: Float[Tensor, "H B n"], *, queries: int, at: dict[str, float]
) -> dict[str, Float[Tensor, " H"]]:
    """Return half of the 95 % interval of the mean and of quantiles, per head.

    Args:
        theta_HBn: θ of the chosen rows in order; NaN where a row does not count.
        queries: Of how many they were chosen.
        at: Names and levels of the quantiles.
    """
    left = 1 - theta_HBn.shape[-1] / queries
    sorted_HN = theta_HBn.flatten(1).sort(-1).values  # NaN last
    known_H = (~theta_HBn.isnan()).sum((1, 2))
    found = {"mean": _error(theta_HBn, left)}
    for name, level in at.items():
        level_H = torch.full_like(known_H, level, dtype=theta_HBn.dtype)
        value_H = _of_level(sorted_HN, known_H, level_H, torch.round)
        below_HBn = (theta_HBn <= value_H[:, None, None]).to(theta_HBn.dtype)
        share_H = _error(below_HBn.where(~theta_HBn.isnan(), torch.nan), left)
        low_H = _of_level(sorted_HN, known_H, level_H - share_H, torch.floor)
        high_H = _of_level(sorted_HN, known_H, level_H + share_H, torch.ceil)
        found[name] = (high_H - low_H) / 2
    return found


def _error(y_HBn: Tensor, left: float) -> Tensor:
    """Return half of the 95 % interval of a mean over rows, NaN left out."""
    known_HBn = ~y_HBn.isnan()
    count_H = known_HBn.sum((1, 2))
    off_HBn = (y_HBn - y_HBn.nanmean((1, 2), keepdim=True)).where(known_HBn, 0.0)
    total_Hn = off_HBn.sum(1)
    n = total_Hn.shape[-1]
    square_H = total_Hn.diff(dim=-1).square().sum(-1) * (n / (2 * max(n - 1, 1)))
    error_H: Tensor = _WIDTH * (left * square_H).sqrt() / count_H
    return error_H


def _of_level(
    sorted_HN: Tensor, known_H: Tensor, level_H: Tensor, towards: _Rounding
) -> Tensor:
    """Return the value at a level from 0 to 1 among the known ones."""
    place_H = towards(level_H * (known_H - 1)).nan_to_num()
    place_H = torch.minimum(place_H.clamp(min=0), (known_H - 1).clamp(min=0))
    return sorted_HN.gather(1, place_H.long()[:, None])[:, 0]
