"""What each head's attention looks like: sensitivity, logits, entropy, sinks.

Axes, in this file:  B batch · H head · Q query · N row, of all sequences · C column ·
b, h, q, k the part of one piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.attention_rows import COLUMNS, RowStatistics, row_columns
from equipoise.numerics.quantiles import nan_quantiles
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit, How
from equipoise.probes.histogram import HISTOGRAM, theta_histogram

QUANTILES = {"p0": 0.0, "p5": 0.05, "p50": 0.5, "p100": 1.0}
# The ends of several ranks combine; what lies between, their histograms tell.
ENDS: dict[str, How] = {"p0": "min", "p100": "max"}
# What is read as a mean over rows.
MEANS = {
    "theta.upper": "theta_upper",
    "entropy": "entropy",
    "sink": "sink",
}


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Emit per head θ quantiles, max logit, entropy and sink mass of one call.

    Rows with fewer than two visible keys say nothing about selection (their θ is 0 by
    construction) and are left out, as are the rows of padding; how many is a reading of
    its own.
    """

    name: str = "attention"
    ranks: int = 1
    """Over how many ranks the rows are spread."""

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from ()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        rows = _rows(call)
        real_HN = call.counted_BQ().flatten().expand(rows.visible.shape)
        counted_HN = rows.counted & real_HN
        self._theta(site, rows.theta_lower.where(counted_HN, torch.nan), emit)
        hidden = float("-inf")
        logit_H = rows.max_logit.where(counted_HN, hidden).amax(-1)
        emit(site, "attention.max_logit", logit_H, how="max")
        for name, field in MEANS.items():
            value_HN: Tensor = getattr(rows, field).where(counted_HN, torch.nan)
            emit(site, f"attention.{name}", value_HN.nanmean(-1), how="mean")
        left_out = (~counted_HN).sum(-1).to(torch.float64)
        emit(site, "attention.rows_left_out", left_out, how="sum")
        emit(site, "precision.kappa_softmax", _kappa_softmax(rows, real_HN), how="max")

    def _theta(self, site: str, theta_HN: Tensor, emit: Emit) -> None:
        """θ is read from below, where a subset attains it."""
        found_qH = nan_quantiles(theta_HN, list(QUANTILES.values()))
        for name, theta_H in zip(QUANTILES, found_qH, strict=True):
            emit(site, f"attention.theta.{name}", theta_H, how=ENDS.get(name, "last"))
        if self.ranks > 1:
            emit(site, HISTOGRAM, theta_histogram(theta_HN), how="sum")
        mean_H = theta_HN.nanmean(-1)
        emit(site, "attention.theta.mean", mean_H, how="mean")
        emit(site, "attention.theta.lower", mean_H, how="mean")


def _rows(call: AttentionCall) -> RowStatistics:
    """Return (H, B·Q) of each statistic: every row of a head."""
    columns_CHBQ: Tensor | None = None
    B, H, Q, _ = call.shape
    for where, scores_bhqk in call.pieces():
        first = where.queries.start if call.causal else None
        read_Cbhq = row_columns(scores_bhqk, causal_from=first)
        if columns_CHBQ is None:
            columns_CHBQ = read_Cbhq.new_empty(COLUMNS, H, B, Q)
        columns_CHBQ.transpose(1, 2)[:, *where] = read_Cbhq
    assert columns_CHBQ is not None
    return RowStatistics.of(columns_CHBQ.flatten(2))


def _kappa_softmax(rows: RowStatistics, real_HN: Tensor) -> Tensor:
    """Return max‖J‖₂·‖S‖_F/‖P‖_F per head (Baek, v2), ‖J‖₂ from above and within 2×."""
    gain_HN, scores_HN, masses_HN = (
        x_HN.where(real_HN, 0.0)
        for x_HN in (rows.jacobian_norm, rows.score_square, rows.mass_square)
    )
    return gain_HN.amax(-1) * (scores_HN.sum(-1) / masses_HN.sum(-1)).sqrt()
