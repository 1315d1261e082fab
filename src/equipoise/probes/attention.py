"""What each head's attention looks like: sensitivity, logits, entropy, sinks.

Axes, in this file:  B batch · H head · Q query · K key · q queries of one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.attention_rows import RowStatistics, row_statistics
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit, How
from equipoise.probes.histogram import HISTOGRAM, theta_histogram

QUANTILES = {"p0": 0.0, "p5": 0.05, "p50": 0.5, "p100": 1.0}
# The ends of several ranks combine; what lies between, their histograms tell.
ENDS: dict[str, How] = {"p0": "min", "p100": "max"}


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
        rows = [
            row_statistics(scores, causal_from=first)
            for first, scores in call.causal_blocks()
        ]
        visible_HN = _by_head([r.visible for r in rows])
        real_BQ = call.counted_BQ()
        real_HN = real_BQ.flatten().expand(visible_HN.shape)
        counted_HN = (visible_HN >= 2) & real_HN
        lower_HN, upper_HN = (
            _by_head([getattr(r, side) for r in rows])
            for side in ("theta_lower", "theta_upper")
        )
        self._theta(site, lower_HN, upper_HN, counted_HN, emit)
        self._others(site, rows, counted_HN, emit)
        emit(site, "precision.kappa_softmax", _kappa_softmax(rows, real_HN), how="max")

    def _theta(
        self, site: str, lower_HN: Tensor, upper_HN: Tensor, counted: Tensor, emit: Emit
    ) -> None:
        """θ is read from below, where a subset attains it; the upper end stands by."""
        theta_HN = lower_HN.masked_fill(~counted, float("nan"))
        at_q = torch.tensor(list(QUANTILES.values()), dtype=theta_HN.dtype)
        found_qH = torch.nanquantile(theta_HN, at_q.to(theta_HN.device), dim=-1)
        for name, theta_H in zip(QUANTILES, found_qH, strict=True):
            emit(site, f"attention.theta.{name}", theta_H, how=ENDS.get(name, "last"))
        if self.ranks > 1:
            emit(site, HISTOGRAM, theta_histogram(theta_HN), how="sum")
        mean_H = theta_HN.nanmean(-1)
        emit(site, "attention.theta.mean", mean_H, how="mean")
        emit(site, "attention.theta.lower", mean_H, how="mean")
        upper_HN = upper_HN.masked_fill(~counted, float("nan"))
        emit(site, "attention.theta.upper", upper_HN.nanmean(-1), how="mean")

    def _others(
        self, site: str, rows: list[RowStatistics], counted: Tensor, emit: Emit
    ) -> None:
        logit_HN = _by_head([r.max_logit for r in rows])
        hidden = float("-inf")
        logit_H = logit_HN.masked_fill(~counted, hidden).amax(-1)
        emit(site, "attention.max_logit", logit_H, how="max")
        for name in ("entropy", "sink"):
            value_HN = _by_head([getattr(r, name) for r in rows])
            mean_H = value_HN.masked_fill(~counted, float("nan")).nanmean(-1)
            emit(site, f"attention.{name}", mean_H, how="mean")
        left_out = (~counted).sum(-1).to(torch.float64)
        emit(site, "attention.rows_left_out", left_out, how="sum")


def _kappa_softmax(rows: list[RowStatistics], real_HN: Tensor) -> Tensor:
    """Return max‖J‖₂·‖S‖_F/‖P‖_F per head (Baek, v2), ‖J‖₂ from above and within 2×."""
    gain_HN, scores_HN, masses_HN = (
        _by_head([getattr(r, name) for r in rows]).masked_fill(~real_HN, 0.0)
        for name in ("jacobian_norm", "score_square", "mass_square")
    )
    return gain_HN.amax(-1) * (scores_HN.sum(-1) / masses_HN.sum(-1)).sqrt()


def _by_head(blocks_BHq: list[Tensor]) -> Tensor:
    """Return (H, B·Q): every row of a head, over batch and queries."""
    return torch.cat(blocks_BHq, dim=-1).transpose(0, 1).flatten(1)
