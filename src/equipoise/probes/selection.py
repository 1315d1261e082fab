"""Does each head still select? A few queries of every call, against chance.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · T token ·
D width · q sampled queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from equipoise.anatomy.calls import AttentionCall
from equipoise.numerics.selection import (
    AtSizes,
    HeadMetricOptions,
    concentration,
    selection_of_weights,
)
from equipoise.probes.protocols import Emit


@dataclass(frozen=True, slots=True)
class HeadSelection:
    """Emit per head the range of logits, evenness, lift and recall, with its control.

    Means over evenly spaced queries of the first sequence, the last query among them.
    Rows of padding and rows that see no more keys than are chosen are left out.
    """

    name: str = "selection"
    at_most: int = 8
    """Queries to look at per call."""
    sequences: int = 1
    """Sequences to look at per call: widening their tokens is most of the cost."""
    most: int = 16
    """Tokens chosen: this many, or an eighth of the context where that is less."""

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        at = spread(call.shape[2], self.at_most)
        some = slice(0, self.sequences)
        z_BHqK = sampled_scores(call, at)[some]
        w_BHqK = softmax_of(z_BHqK)
        real_BHq = call.counted_BQ()[some, None, at]
        seen = concentration(z_BHqK, weights=w_BHqK)
        several = real_BHq & (seen.visible > 1)
        emit(site, "selection.rho", mean_by_head(seen.rho, several), how="mean")
        emit(
            site, "selection.evenness", mean_by_head(seen.evenness, several), how="mean"
        )
        if call.v_BGKD is not None:
            found = against_chance(w_BHqK, z_BHqK, call.v_BGKD[some], most=self.most)
            for name, value_BHq in _named(found):
                emit(
                    site,
                    f"selection.{name}",
                    mean_by_head(value_BHq, real_BHq),
                    how="mean",
                )


def spread(queries: int, at_most: int) -> list[int]:
    """Return evenly spaced positions, the last included: it sees the most keys."""
    step = -(-queries // at_most)
    return list(range(queries - 1, -1, -step))[::-1]


def sampled_scores(call: AttentionCall, at: list[int]) -> Tensor:
    """Return the sampled queries' scores side by side, keys beyond the last hidden."""
    rows = [call.scores(slice(i, i + 1)) for i in at]
    K = max(z_BH1k.shape[-1] for z_BH1k in rows)
    rows = [pad(z, (0, K - z.shape[-1]), value=float("-inf")) for z in rows]
    return torch.cat(rows, dim=2)


def softmax_of(z_BHqK: Tensor) -> Tensor:
    """Return weights, 0 in a row that sees nothing; no look at the numbers, no sync."""
    dark_BHq1 = (z_BHqK == float("-inf")).all(-1, keepdim=True)
    lit_BHqK = z_BHqK.masked_fill(dark_BHq1, 0.0).softmax(-1)
    return lit_BHqK.masked_fill(dark_BHq1, 0.0)


def against_chance(
    w_BHqK: Tensor, z_BHqK: Tensor, v_BGKD: Tensor, *, most: int
) -> AtSizes:
    """Return the readings of the heaviest tokens.

    Columns without a value (learned sinks) take their share of the mass and are no
    token.
    """
    T = min(w_BHqK.shape[-1], v_BGKD.shape[2])
    wanted = HeadMetricOptions(tops=(max(1, min(most, T // 8)),), random=2)
    seen_BHqT = z_BHqK[..., :T] != float("-inf")
    v_BGTD = v_BGKD.detach()[:, :, :T]
    return selection_of_weights(w_BHqK[..., :T], v_BGTD, wanted=wanted, mask=seen_BHqT)


def _named(found: AtSizes) -> Iterator[tuple[str, Tensor]]:
    assert found.distance is not None and found.euclidean is not None
    assert found.cosine is not None and found.random_euclidean is not None
    yield "lift", found.distance.lift_lower[..., 0]
    yield "recall", found.euclidean.recall[..., 0]
    yield "recall.cosine", found.cosine.recall[..., 0]
    yield "recall.random", found.random_euclidean.recall[..., 0]


def mean_by_head(value_BHq: Tensor, counted_BHq: Tensor) -> Tensor:
    """Return the mean over batch and queries per head; NaN where nothing counted."""
    value_BHq = value_BHq.masked_fill(~counted_BHq, float("nan"))
    mean_H: Tensor = value_BHq.transpose(0, 1).flatten(1).nanmean(1)
    return mean_H
