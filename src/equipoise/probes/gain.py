"""How strongly a layer's projections act, read while the weights are whole.

Axes, in this file:  H head · G key-value head · R head width · D model width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.parallel import held_here, is_whole
from equipoise.anatomy.sites import Anatomy, Projections
from equipoise.numerics.head_products import head_product_norms
from equipoise.numerics.tracking import tracked_norm
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit

SHARDED = (
    "its weights are sharded over tensor-parallel ranks, and the norm of a part is no "
    "part of the norm: projection.norm, projection.G, sensitivity, the papers' kappas "
    "and attention.lipschitz are not read (what is read head by head is)"
)
Start = dict[tuple[str, str], Tensor]
Letter = Literal["q", "k", "v", "o"]


@dataclass(slots=True)
class ProjectionGain:
    """Emit G = ‖W_O‖₂‖W_Q‖₂‖W_K‖₂‖W_V‖₂ of each attention site (Emadi 2026, §6).

    The vectors of the last sample start the next: weights move little between samples.
    """

    name: str = "gain"
    _anatomy: Anatomy | None = None
    _start: Start = field(default_factory=dict)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        yield from ()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        projections = projections_of(self._anatomy, call)
        if projections is None:
            return
        if not is_whole(projections):
            assert self._anatomy is not None
            self._anatomy.partly.setdefault(site, SHARDED)
            return
        norms = []
        for letter in "qkvo":
            matrix = getattr(projections, letter).matrix()
            start = self._start.get((site, letter))
            norm, self._start[site, letter] = tracked_norm(matrix, start=start)
            emit(site, f"projection.norm.{letter}", norm)
            norms.append(norm)
        emit(site, "projection.G", torch.stack(norms).prod())


@dataclass(slots=True)
class HeadProducts:
    """Emit per head ‖W_Q W_Kᵀ‖₂ and ‖W_V W_O‖₂: what the scores and the values see.

    The product of the factors' norms, which G uses, can exceed these by far; a head
    whose product grows while G stands still is turning, not growing.
    """

    name: str = "heads"
    _anatomy: Anatomy | None = None
    _start: Start = field(default_factory=dict)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        yield from ()

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        projections = projections_here(self._anatomy, call)
        if projections is None:
            return
        pairs: tuple[tuple[Letter, Letter], ...] = (("q", "k"), ("v", "o"))
        for a, b in pairs:
            a_HRD, b_HRD = projections.by_head(a), projections.by_head(b)
            found = head_product_norms(a_HRD, b_HRD, start=self._start.get((site, a)))
            emit(site, f"projection.{a}{b}", found.value_H)
            self._start[site, a] = found.start_HR


def projections_of(anatomy: Anatomy | None, call: AttentionCall) -> Projections | None:
    """Return the caller's projections, if it has any; a rank may hold parts of them."""
    assert anatomy is not None
    found = anatomy.site(call.module) if call.module is not None else None
    return None if found is None else found.projections


def projections_here(
    anatomy: Anatomy | None, call: AttentionCall
) -> Projections | None:
    """Return the maps of the heads that are on this rank, if they are whole."""
    found = projections_of(anatomy, call)
    return None if found is None else held_here(found, call.shape[1])
