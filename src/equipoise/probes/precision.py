"""How exposed attention and norms are to narrow formats, read while training.

Axes, in this file: B batch · H head · Q query · K key · D head width · T token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import WHOLE, Split, head_split
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.numerics.formats import FORMATS
from equipoise.numerics.fragility import head_error, norm_condition
from equipoise.probes.hidden_states import EPSILONS, read_inputs
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.sharding import Parts, PartsProbe, names, parts_by_rank
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2

# A sample is enough for an error size, and keeps the cost of a reading flat in L.
QUERIES = 256
# Over heads, the terms of the second paper are maxima or root-sum-squares.
LARGEST, SUMMED = ("gain", "v_spectral"), ("q", "k", "s", "p", "a")
APART = Reason("heads_apart", hides=("precision.kappa_softmax",))
DRAWN = Reason("heads_drawn", hides=("baek_v1.kappa_*",))


@dataclass(slots=True)
class NumericalFragility(PartsProbe):
    """Emit the published indicators and ours, for attention and for norms.

    ``precision.rms_error.bf16`` is the relative error of PV per head, on the first
    sequence and at most 256 queries. Indicators of the papers keep their names.
    """

    name: str = "fragility"
    ranks: int = 1
    """How many watch together."""

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from read_inputs(anatomy.norms, partial(_norm, emit), guarded)

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        first = _first_sequence(call)
        if first is None:
            return
        q, k, v, visible = first
        eye = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device).expand(
            v.shape[0], -1, -1
        )
        found = head_error(
            (q, k, v), eye, format=FORMATS["bf16"], scale=call.scale, visible_QK=visible
        )
        emit(site, "precision.rms_error.bf16", found.relative, how="mean")
        later = v2.attention_v2((q, k, v), visible_NK=visible)
        split = head_split(call.module)
        if split != WHOLE:  # the papers' are of all heads together
            self._share(site, later, split, emit)
            return
        _published_later(emit, site, later)
        rng = torch.Generator().manual_seed(0)
        s = (call.scale * (q @ k.mT)).masked_fill(~visible, -math.inf)
        emit(site, "baek_v1.kappa_softmax", v1.kappa_softmax(s, generator=rng))
        emit(site, "baek_v1.kappa_score", v1.kappa_score(q, k, generator=rng))
        emit(site, "baek_v1.kappa_value", v1.kappa_value(v, generator=rng))

    def _share(self, site: str, here: v2.AttentionV2, split: Split, emit: Emit) -> None:
        emit.not_read(site, DRAWN if self.ranks > 1 else APART)
        if self.ranks > 1:
            numbers = [getattr(here, name) for name in (*LARGEST, *SUMMED)]
            width = torch.full_like(here.p, here.head_width)
            self._parts.add(site, torch.stack([*numbers, width]), split)

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        for site in names(ranks):
            for heads in parts_by_rank(ranks, site)[:1]:
                _published_later(emit, site, _of_all_heads(torch.stack(heads)))


def _of_all_heads(parts_RN: Tensor) -> v2.AttentionV2:
    largest_N, norm_N = parts_RN.amax(0), torch.linalg.vector_norm(parts_RN, dim=0)
    at = {name: i for i, name in enumerate((*LARGEST, *SUMMED))}
    return v2.AttentionV2(
        head_width=int(largest_N[-1]),
        **{name: largest_N[at[name]] for name in LARGEST},
        **{name: norm_N[at[name]] for name in SUMMED},
    )


def _published_later(emit: Emit, site: str, found: v2.AttentionV2) -> None:
    for name in ("kappa_softmax", "chi_score", "kappa_val"):
        emit(site, f"baek_v2.{name}", getattr(found, name))


def _first_sequence(
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return q, k, v of the first sequence, some queries, and what each may see."""
    if call.q_BHQD is None or call.k_BGKD is None or call.v_BGKD is None:
        return None
    queries = slice(0, min(QUERIES, call.shape[2]))
    visible = (call.scores(queries)[0] > -math.inf).detach()
    K, H = visible.shape[-1], call.q_BHQD.shape[1]
    q = call.q_BHQD[0, :, queries].detach().float()
    k, v = (
        x[0, :, :K].detach().float().repeat_interleave(H // x.shape[1], 0)
        for x in (call.k_BGKD, call.v_BGKD)
    )
    seen_Q = visible.any(-1).all(0)
    return q[:, seen_Q], k, v, visible[:, seen_Q]


def _norm(emit: Emit, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    eps = next((e for n in EPSILONS if (e := getattr(module, n, None))), None)
    if not isinstance(eps, float):
        return
    x_ND = x_BTD.detach().float().flatten(0, -2)
    centred = "rms" not in type(module).__name__.lower()
    found = norm_condition(x_ND, eps=eps, statistics=FORMATS["fp32"], centred=centred)
    emit(site, "precision.kappa_ln", found.cancellation.median(), how="mean")
    emit(site, "precision.epsilon_share.p50", found.epsilon_share.median(), how="mean")
    dominated = (found.epsilon_share > 0.5).float().mean()
    emit(site, "precision.epsilon_dominated", dominated, how="mean")
    emit(site, "precision.statistics_error", found.statistics_error.amax(), how="max")
    emit(site, "baek_v1.c_ln", v1.c_ln(x_ND, eps=eps), how="mean")
    rho = v1.rho_ln(x_ND, eps=eps, format=FORMATS["fp16"])
    emit(site, "baek_v1.rho_ln", rho, how="mean")
