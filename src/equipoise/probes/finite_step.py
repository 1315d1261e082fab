"""How far a few rows of every call can move when their logits move by one.

Axes, in this file:  B batch · H head · q sampled query · K key.
"""

from dataclasses import dataclass

from equipoise.anatomy.calls import AttentionCall
from equipoise.numerics.rows.finite_step import attained_step
from equipoise.probes.protocols import Emit
from equipoise.probes.selection import (
    mean_by_head,
    sampled_scores,
    softmax_of,
    spread,
)

RADIUS = 1.0
"""How far each logit may move."""


@dataclass(frozen=True, slots=True)
class FiniteSteps:
    """Emit per head the change in ℓ1 that logits within 1 can make of a row.

    A mean over evenly spaced queries of the first sequence; never more than the truth.
    Rows with one key, and calls with a learned sink, are left out.
    """

    name: str = "finite_step"
    at_most: int = 8
    """Queries to look at per call."""

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        if call.sinks:  # a sink is not a key: its mass stays where it is
            return
        at = spread(call.shape[2], self.at_most)
        z_BHqK = sampled_scores(call, at)[:1]
        real_BHq = call.counted_BQ()[:1, None, at]
        several_BHq = real_BHq & ((z_BHqK > float("-inf")).sum(-1) > 1)
        moved_BHq = attained_step(softmax_of(z_BHqK), radius=RADIUS)
        mean_H = mean_by_head(moved_BHq, several_BHq)
        emit(site, "attention.finite_step", mean_H, how="mean")
