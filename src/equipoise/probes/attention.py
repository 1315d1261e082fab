"""Attention rows: per head the sensitivity θ, logits, entropy and sinks.

Quantiles of several ranks' rows come from counts of θ in fixed bins, which add up where
quantiles do not. Bins are even in the angle a of θ = sin²(πa/2): the widest, at θ = ½,
is π/2/BINS; at both ends, where heads that saturate or stay undecided differ, they are
narrow.

Axes, in this file:  B batch · H head · Q query · N row, of all sequences · C column ·
Z bin · b, h, q, k the part of one piece.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.anatomy.calls import OTHER_WEIGHTS, AttentionCall
from equipoise.anatomy.sharding import head_split
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.numerics.compiled import to_device
from equipoise.numerics.rows.sinks import KEY_MASS, SINK_LOGIT, key_columns
from equipoise.numerics.rows.statistics import COLUMNS, RowStatistics
from equipoise.numerics.token_statistics import nan_quantiles
from equipoise.probes.fused_rows import DEVICES, fused_columns, readable
from equipoise.probes.protocols import Emit, How
from equipoise.probes.row_sample import (
    chosen_queries,
    query_weights,
    read_sink,
    rows_of,
    sampled_columns,
    sampling_errors,
    weighted_mean,
    weighted_quantiles,
)
from equipoise.probes.sharding import Parts, PartsProbe, names, parts_by_rank

BINS = 512
HISTOGRAM = "attention.theta.histogram"
"""Only between ranks: what is written are the quantiles of all ranks' rows."""


def theta_histogram(
    theta_HN: Float[Tensor, "H N"], weight_N: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "H Z"]:
    """Return how many rows of each head fall into each bin; NaN falls into none.

    With weights: how many rows those stand for that were read.

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
    count_HN = known_HN.to(theta_HN.dtype)
    count_HN = count_HN if weight_N is None else count_HN * weight_N
    return counts_HZ.scatter_add_(1, bin_HN, count_HN)


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


QUANTILES = {"p0": 0.0, "p5": 0.05, "p50": 0.5, "p100": 1.0}
# The ends of several ranks combine; what lies between, their histograms tell.
ENDS: dict[str, How] = {"p0": "min", "p100": "max"}
# What is read as a mean over rows.
MEANS = {
    "theta.upper": "theta_upper",
    "entropy": "entropy",
    "sink": "sink",
}

LEARNED = {"key_mass": KEY_MASS, "sink_logit": SINK_LOGIT}
"""What is read as a mean over rows beside learned sinks, by its column."""


MAX_LOGIT, KAPPA = "attention.max_logit", "precision.kappa_softmax"
NO_SOFTMAX = Reason(
    "no_softmax",
    hides=(
        "attention.max_logit",
        "projection.G",
        "sensitivity.*",
        "precision.kappa_softmax",
    ),
)


@dataclass(slots=True)
class AttentionRows(PartsProbe):
    """Emit per head θ quantiles, max logit, entropy and sink mass of one call.

    Rows with fewer than two visible keys carry no selection (their θ is 0 by
    construction) and are left out, as are the rows of padding; how many is a reading of
    its own.
    """

    name: str = "attention"
    ranks: int = 1
    """Over how many ranks the rows are spread."""
    rows: int | Literal["all"] = "all"
    """Queries read of a call; of more, a sample of so many (``row_sample``)."""
    _step: int = 0

    def begin_step(self, step: int) -> None:
        """Take the number of the step: which rows are chosen depends on it."""
        self._step = step

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        chosen_n = self._chosen(site, call)
        columns_CHN, real_BQ = _columns(call, chosen_n), call.counted_BQ()
        rows = RowStatistics.of(columns_CHN[:COLUMNS])
        read_BQ = real_BQ if chosen_n is None else rows_of(real_BQ, chosen_n)
        real_HN = read_BQ.flatten().expand(rows.visible.shape)
        counted_HN = rows.counted & real_HN
        theta_HN = rows.theta_lower.where(counted_HN, torch.nan)
        weight_N = _weights(call, chosen_n)
        self._theta(site, theta_HN, weight_N, emit)
        if chosen_n is not None and weight_N is not None:
            theta_HBn = theta_HN.unflatten(1, read_BQ.shape)
            _emit_errors(site, theta_HBn, weight_N[: len(chosen_n)], emit)
        if call.kind != OTHER_WEIGHTS:
            logit_H = rows.max_logit.where(counted_HN, -math.inf).amax(-1)
            name = MAX_LOGIT if chosen_n is None else f"{MAX_LOGIT}.sampled"
            emit(site, name, logit_H, how="max")
        for name, field in MEANS.items():
            value_HN: Tensor = getattr(rows, field).where(counted_HN, torch.nan)
            emit(site, f"attention.{name}", _mean(value_HN, weight_N), how="mean")
        for name, column in LEARNED.items() if call.sinks else ():
            value_HN = columns_CHN[column].where(counted_HN, torch.nan)
            emit(site, f"attention.{name}", _mean(value_HN, weight_N), how="mean")
        left_out = (~counted_HN).sum(-1).to(torch.float64)
        emit(site, "attention.rows_left_out", left_out, how="sum")
        if call.kind == OTHER_WEIGHTS:
            emit.not_read(site, NO_SOFTMAX)
        else:
            self._kappa(site, call, _kappa_parts(rows, real_HN, weight_N), emit)

    def _chosen(self, site: str, call: AttentionCall) -> Tensor | None:
        """Return which queries are read, None for all."""
        queries = call.shape[2]
        if self.rows == "all" or queries <= self.rows:
            return None
        return chosen_queries(queries, self.rows, step=self._step, site=site)

    def _kappa(
        self, site: str, call: AttentionCall, parts_3H: Tensor, emit: Emit
    ) -> None:
        if self.ranks > 1:
            self._parts.add(site, parts_3H, head_split(call.module))
        else:
            emit(site, KAPPA, _kappa_softmax(parts_3H), how="max")

    def begin(self, anatomy: Anatomy) -> int:
        """Return how many numbers a sample's parts are: three for each head."""
        heads = (s.projections.heads if s.projections else 0 for s in anatomy.attention)
        return 3 * sum(heads)

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        """Emit κ over the rows of all ranks: no mean or maximum of theirs is that."""
        for site in names(ranks):
            copies = [torch.cat(heads, 1) for heads in parts_by_rank(ranks, site)]
            if copies:
                gain_H, scores_H, masses_H = torch.stack(copies).unbind(1)
                parts = gain_H.amax(0), scores_H.sum(0), masses_H.sum(0)
                emit(site, KAPPA, _kappa_softmax(torch.stack(parts)))

    def _theta(
        self, site: str, theta_HN: Tensor, weight_N: Tensor | None, emit: Emit
    ) -> None:
        """θ is read from below, where a subset attains it."""
        at = list(QUANTILES.values())
        if weight_N is None:
            found_qH = nan_quantiles(theta_HN, at)
        else:
            found_qH = weighted_quantiles(theta_HN, weight_N, at)
        for name, theta_H in zip(QUANTILES, found_qH, strict=True):
            emit(site, f"attention.theta.{name}", theta_H, how=ENDS.get(name, "last"))
        if self.ranks > 1:
            emit(site, HISTOGRAM, theta_histogram(theta_HN, weight_N), how="sum")
        emit(site, "attention.theta.mean", _mean(theta_HN, weight_N), how="mean")


def _weights(call: AttentionCall, chosen_n: Tensor | None) -> Tensor | None:
    """Return how many rows each row that is read stands for; None where all are."""
    if chosen_n is None:
        return None
    B, _, Q, _ = call.shape
    like = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
    assert like is not None
    return to_device(query_weights(Q, len(chosen_n)).repeat(B), like.device)


def _mean(x_HN: Tensor, weight_N: Tensor | None) -> Tensor:
    return x_HN.nanmean(-1) if weight_N is None else weighted_mean(x_HN, weight_N)


def _emit_errors(site: str, theta_HBn: Tensor, weight_n: Tensor, emit: Emit) -> None:
    """Say how far what all rows give may be from what a sample of them gives."""
    inner = {name: q for name, q in QUANTILES.items() if name not in ENDS}
    found = sampling_errors(theta_HBn, weight_n, at=inner)
    for name, error_H in found.items():
        emit(site, f"attention.theta.{name}.error", error_H, how="max")


def rows_of_call(call: AttentionCall, chosen_n: Tensor | None = None) -> RowStatistics:
    """Return the statistics of a call's rows: of all, or of the chosen queries."""
    return RowStatistics.of(_columns(call, chosen_n)[:COLUMNS])


def _columns(call: AttentionCall, chosen_n: Tensor | None) -> Tensor:
    """Return (C, H, B·Q): every row of a head, or every chosen one."""
    q = call.q_BHQD  # asked here: on the CPU no other file takes part
    if q is not None and q.device.type in DEVICES and readable(call):
        return fused_columns(call, chosen_n)[:COLUMNS].flatten(2)
    if chosen_n is not None:
        return sampled_columns(call, chosen_n).flatten(2)
    columns_CHBQ: Tensor | None = None
    B, H, Q, _ = call.shape
    first_BQ = call.first_key_BQ()
    for where, scores_bhqk in call.pieces():
        first = where.queries.start if call.causal else None
        read_Cbhq = key_columns(scores_bhqk, sinks=call.sinks, causal_from=first)
        if first_BQ is not None:
            read_sink(read_Cbhq, scores_bhqk, first_BQ[where.sequences, where.queries])
        if columns_CHBQ is None:
            columns_CHBQ = read_Cbhq.new_empty(len(read_Cbhq), H, B, Q)
        columns_CHBQ.transpose(1, 2)[:, *where] = read_Cbhq
    assert columns_CHBQ is not None
    return columns_CHBQ.flatten(2)


def _kappa_parts(
    rows: RowStatistics, real_HN: Tensor, weight_N: Tensor | None
) -> Tensor:
    """Return max‖J‖₂, ‖S‖_F² and ‖P‖_F² per head, of real rows, ‖J‖₂ from above."""
    gain_HN, scores_HN, masses_HN = (
        x_HN.where(real_HN, 0.0)
        for x_HN in (rows.jacobian_norm, rows.score_square, rows.mass_square)
    )
    if weight_N is not None:
        scores_HN, masses_HN = scores_HN * weight_N, masses_HN * weight_N
    return torch.stack((gain_HN.amax(-1), scores_HN.sum(-1), masses_HN.sum(-1)))


def _kappa_softmax(parts_3H: Tensor) -> Tensor:
    """Return max‖J‖₂·‖S‖_F/‖P‖_F per head (Baek, v2), ‖J‖₂ within 2×.

    NaN where there is no row: a row that is read has masses that sum to 1.
    """
    gain_H, scores_H, masses_H = parts_3H.unbind(0)
    return gain_H * (scores_H / masses_H).sqrt()
