"""How strongly attention can pass a small change of one token on, here and now.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D model
width · E head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import head_split, local_part
from equipoise.anatomy.sites import Anatomy, Projections, Reason, Weight
from equipoise.numerics.compiled import to_device
from equipoise.probes.gain import projections_here
from equipoise.probes.protocols import Emit, Guarded, WithAnatomy
from equipoise.probes.sharding import Parts, PartsProbe, names, parts_by_rank
from equipoise.theory.lipschitz.forward import attend_captured
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.lipschitz.local import local_paths

# Attention whose queries and keys are what the projections gave: no rotation.
UNTURNED = {
    *("GPT2Attention", "BertSelfAttention", "RobertaSelfAttention", "ViTAttention"),
    *("OPTAttention", "CLIPAttention", "WhisperAttention", "MultiheadAttention"),
}
LIPSCHITZ = "attention.lipschitz"
# Rounding of lengths in the model's own format, relative; of float32, also of RoPE.
SPACINGS, LEAST = 8, 1e-4

NOT_PROJECTED = Reason("not_projected", hides=("attention.lipschitz",))
NO_VALUES = Reason(
    "values_inside",
    hides=(
        "attention.lipschitz",
        "precision.rms_error",
        "selection.lift",
        "selection.recall",
    ),
)


@dataclass(slots=True)
class LocalLipschitz(PartsProbe, WithAnatomy):
    """Emit our local bound in block-∞ norm, the worst of some sampled queries.

    An estimate of the bound, because it looks at evenly spaced queries of the first
    sequence only. Queries and keys of a model that may rotate them (RoPE) are bounded
    over all rotations. Read only where the queries and keys that were used are as long
    as what their projections gave, up to one factor: with QK-norm they are not, by
    whatever name it goes, and its derivative is not in the bound.
    """

    name: str = "lipschitz"
    at_most: int = 64
    """Queries to look at per call."""
    ranks: int = 1
    """How many watch together."""
    _given: dict[int, Tensor] = field(default_factory=dict)
    """id(module) → what a projection gave in this pass."""

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self.describe(anatomy)
        self._given.clear()
        seen: set[int] = set()
        for site in anatomy.attention:
            for weight in (
                (site.projections.q, site.projections.k) if site.projections else ()
            ):
                if id(weight.module) not in seen and weight.module is not site.module:
                    seen.add(id(weight.module))
                    yield hooks.after(weight.module, guarded(self._keep))

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # The first sequence, copied: a view would keep the whole output in memory.
        if isinstance(output, Tensor) and output.ndim in (2, 3) and len(output):
            here = local_part(output)
            first = here[0] if here.ndim == 3 else here
            self._given[id(module)] = first.detach().clone()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        projections = projections_here(self._anatomy, call)
        if projections is None or call.q_BHQD is None:
            return
        if call.v_BGKD is None:
            emit.not_read(site, NO_VALUES)
            return
        assert call.k_BGKD is not None
        factors = self._factors(projections, call)
        if factors is None:
            emit.not_read(site, NOT_PROJECTED)
            return
        at_Q = to_device(_spread(call.shape[2], self.at_most), call.q_BHQD.device)
        heads = _heads(projections, call)
        heads = replace(
            heads,
            w_q_HDE=heads.w_q_HDE * factors[0],
            w_k_GDE=heads.w_k_GDE * factors[1],
        )
        attended = attend_captured(
            heads,
            q_HQE=call.q_BHQD[0][:, at_Q].detach(),
            k_GKE=call.k_BGKD[0].detach(),
            v_GKF=call.v_BGKD[0].detach(),
            mask=_mask(call, at_Q),
            queries=at_Q,
        )
        turned = type(call.module).__name__ not in UNTURNED
        total_HQ = local_paths(attended, any_rotation=turned).total_HQ
        emit(site, "attention.lipschitz.heads", total_HQ.amax(-1), how="max")
        if not projections.q.local:
            emit(site, LIPSCHITZ, total_HQ.sum(0).amax(), how="max")
        elif self.ranks > 1:  # the sum over heads needs all of them
            self._parts.add(site, total_HQ.sum(0), head_split(call.module))

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        for site in names(ranks):
            for heads in parts_by_rank(ranks, site):
                emit(site, LIPSCHITZ, torch.stack(heads).sum(0).amax(), how="max")

    def _factors(
        self, projections: Projections, call: AttentionCall
    ) -> tuple[Tensor, Tensor] | None:
        """Return by which factor queries and keys are longer than the projections'.

        None where they are not by one factor, or where that cannot be told. Only the
        CPU is asked; elsewhere what is not by one factor is NaN, and nothing waits.
        """
        assert call.q_BHQD is not None and call.k_BGKD is not None
        if type(call.module) is nn.MultiheadAttention:  # its maps are not modules
            one = call.q_BHQD.new_ones(())
            return one, one
        used = (call.q_BHQD[0], call.k_BGKD[0])
        found = [
            _ratio(self._given.get(id(weight.module)), weight, x_HTD)
            for weight, x_HTD in zip((projections.q, projections.k), used, strict=True)
        ]
        for weight in (projections.q, projections.k):
            self._given.pop(id(weight.module), None)
        if found[0] is None or found[1] is None:
            return None
        (q_factor, q_alike), (k_factor, k_alike) = found[0], found[1]
        alike = q_alike & k_alike
        if alike.device.type == "cpu":
            return (q_factor, k_factor) if alike.numpy() else None
        nan = q_factor.new_full((), torch.nan)
        return torch.where(alike, q_factor, nan), torch.where(alike, k_factor, nan)


def _ratio(
    out_TR: Tensor | None, weight: Weight, x_HTD: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the median of ‖used‖/‖projected‖, and whether all rows have it."""
    H, T, D = x_HTD.shape
    if out_TR is None or out_TR.shape[0] != T:
        return None
    part_RT = weight.part_of(out_TR if weight.transposed else out_TR.mT)
    if part_RT.shape[0] != H * D:
        return None
    raw_HT = part_RT.unflatten(0, (H, D)).float().norm(dim=1)
    ratio_HT = x_HTD.detach().float().norm(dim=-1) / raw_HT
    counted = ratio_HT[raw_HT > 0] if ratio_HT.device.type == "cpu" else ratio_HT
    if not counted.numel():
        return None
    middle = counted.median()
    room = max(LEAST, SPACINGS * torch.finfo(x_HTD.dtype).eps)
    return middle, ((counted / middle - 1).abs() <= room).all()


def _spread(queries: int, at_most: int) -> Tensor:
    """Return evenly spaced positions, the last included: it sees the most keys."""
    count = min(queries, at_most)
    return torch.linspace(0, queries - 1, count).round().long()


def _heads(projections: Projections, call: AttentionCall) -> Heads:
    """Return weights as the bounds want them: one key-value head per captured one."""
    assert call.k_BGKD is not None
    H, G = projections.heads, call.k_BGKD.shape[1]
    shared = slice(None, None, H // G)
    return Heads(
        w_q_HDE=projections.by_head("q").mT,
        w_k_GDE=projections.by_head("k")[shared].mT,
        w_v_GDF=projections.by_head("v")[shared].mT,
        w_o_HFD=projections.by_head("o"),
        scale=call.scale,
        causal=call.causal,
    )


def _mask(call: AttentionCall, at_Q: Tensor) -> Tensor | None:
    """Return the first sequence's mask for the sampled queries, (heads, Q, K)."""
    if call.mask is None:
        return None
    mask = call.mask.detach()
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask[0][:, at_Q] if mask.shape[2] > 1 else mask[0]
