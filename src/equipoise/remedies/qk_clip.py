"""QK-clip: scale W_Q and W_K of a head down when its largest logit passes a limit.

After MuonClip (Kimi K2, arXiv 2507.20534): a head whose largest logit S of this step is
above the limit has its scores multiplied by γ = limit/S, half of it in W_Q and half in
W_K. A key head that serves several query heads is scaled only by what all of them need;
the rest goes into each head's own W_Q, so no other head changes. A largest logit that
is negative, or not finite, is no reason to scale. Biases are scaled with their rows.

Axes, in this file:  H query head · G key head · R row of a stored matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sites import AttentionSite, Projections, Weight
from equipoise.errors import InputError
from equipoise.remedies.attention_hooks import (
    add_edit,
    attention_sites,
    multiply_rows,
    projections_of,
    refuse_hidden_scores,
    refuse_own_norm,
    stored_rows,
)
from equipoise.remedies.base import Changes, Positive, RecordedRemedy, Undo, over_ranks


@dataclass(slots=True)
class LargestLogits:
    """The largest logit of each head since it was last asked."""

    best_H: Tensor | None = None

    def __call__(self, best_H: Tensor) -> None:
        old = self.best_H
        self.best_H = best_H if old is None else torch.maximum(old, best_H)

    def pop(self) -> Tensor | None:
        found, self.best_H = self.best_H, None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class QKClip(RecordedRemedy):
    """Keep every head's largest logit under a limit by its weights."""

    limit: Positive = 100.0
    only: Sequence[str] = ()
    name: ClassVar[str] = "qk_clip"

    def change(self, changes: Changes) -> Undo:
        refuse_hidden_scores(changes.model)
        sites = attention_sites(changes.model, self.only)
        clips = [self._of(changes, site) for site in sites]
        changes.progress["clipped"] = 0

        def clip(optimizer: Optimizer) -> None:
            for one in clips:
                changes.progress["clipped"] += one.clip(self.limit)

        changes.after_step(clip)
        return changes.applied(sites=len(clips), limit=self.limit)

    def _of(self, changes: Changes, site: AttentionSite) -> "_Clip":
        refuse_own_norm(self.name, site)
        maps = projections_of(site)
        for weight in (maps.q, maps.k):
            if hasattr(weight.module, "base_layer"):
                raise InputError(
                    f"{site.name} has adapters beside its projections; merge them "
                    "before qk_clip"
                )
        logits = LargestLogits()
        add_edit(changes, site, "observers", logits)
        return _Clip(maps, logits)


@dataclass(slots=True)
class _Clip:
    maps: Projections
    logits: LargestLogits = field(default_factory=LargestLogits)

    def clip(self, limit: float) -> int:
        """Scale the heads that passed the limit; return how many."""
        best_H = self.logits.pop()
        if best_H is None:
            return 0
        gamma_H = head_factors(over_ranks(best_H, largest=True), limit)
        clipped = int((gamma_H < 1).sum())
        if clipped:
            scale_heads(self.maps, gamma_H)
        return clipped


def head_factors(best_H: Tensor, limit: float) -> Tensor:
    """Return γ per head: limit/S where S passes the limit, 1 elsewhere.

    >>> head_factors(torch.tensor([50.0, 200.0, -300.0, torch.inf, torch.nan]), 100.0)
    tensor([1.0000, 0.5000, 1.0000, 1.0000, 1.0000])
    """
    passes_H = best_H.isfinite() & (best_H > limit)
    return torch.where(passes_H, limit / best_H.clamp(min=limit), 1.0)


def scale_heads(maps: Projections, gamma_H: Tensor) -> None:
    """Multiply each query head's scores by γ, and no other head's."""
    shared_G = gamma_H.unflatten(0, (maps.kv_heads, -1)).amax(1).sqrt()
    if _same_map(maps):
        _scale(maps.q, gamma_H.sqrt())
        return
    own_H = gamma_H / shared_G.repeat_interleave(maps.heads // maps.kv_heads)
    _scale(maps.q, own_H)
    _scale(maps.k, shared_G)


def _same_map(maps: Projections) -> bool:
    """Return whether W_Q is W_K: then it is scaled once, and acts twice."""
    same = maps.q.module is maps.k.module and maps.q.attribute == maps.k.attribute
    return same and maps.q.rows is None and maps.k.rows is None


def _scale(weight: Weight, factor_H: Tensor) -> None:
    rows = stored_rows(weight)
    stored: Tensor = getattr(weight.module, weight.attribute)
    axis = 1 if weight.transposed else 0
    factor_R = torch.ones(stored.shape[axis], device=factor_H.device)
    by_row = factor_H.repeat_interleave(len(rows) // len(factor_H))
    factor_R[rows.to(factor_H.device)] = by_row.float()
    multiply_rows(stored, factor_R, axis)
    bias, offset = _bias(weight)
    if bias is not None:
        padded = torch.ones(bias.shape[0], device=factor_R.device)
        padded[offset : offset + len(factor_R)] = factor_R
        multiply_rows(bias, padded, 0)


def _bias(weight: Weight) -> tuple[Tensor | None, int]:
    """Return the bias that goes with a stored matrix, and at which row it begins."""
    if weight.attribute == "weight":
        return getattr(weight.module, "bias", None), 0
    found: Tensor | None = getattr(weight.module, "in_proj_bias", None)
    if found is None or weight.attribute == "in_proj_weight":
        return found, 0
    # torch with separate maps: three of them, one bias.
    place = ("q_proj_weight", "k_proj_weight", "v_proj_weight").index(weight.attribute)
    return found, place * found.shape[0] // 3
