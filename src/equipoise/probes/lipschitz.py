"""How strongly attention can pass a small change of one token on, here and now.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D model
width · E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import head_split
from equipoise.anatomy.sites import Projections, Reason
from equipoise.numerics.compiled import to_device
from equipoise.probes.gain import projections_here
from equipoise.probes.protocols import Emit, WithAnatomy
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
# Names under which models normalise queries and keys; the derivative of that needs x.
QK_NORMS = ("q_norm", "q_layernorm", "query_norm", "q_ln")

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
    over all rotations; with QK-norm there is no reading.
    """

    name: str = "lipschitz"
    at_most: int = 64
    """Queries to look at per call."""
    ranks: int = 1
    """How many watch together."""

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        projections = projections_here(self._anatomy, call)
        if projections is None or call.q_BHQD is None or _normalises(call.module):
            return
        if call.v_BGKD is None:
            emit.not_read(site, NO_VALUES)
            return
        assert call.k_BGKD is not None
        at_Q = to_device(_spread(call.shape[2], self.at_most), call.q_BHQD.device)
        attended = attend_captured(
            _heads(projections, call),
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


def _normalises(module: nn.Module | None) -> bool:
    return any(getattr(module, name, None) is not None for name in QK_NORMS)


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
