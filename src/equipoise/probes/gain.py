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
from equipoise.anatomy.sites import Anatomy, Projections
from equipoise.numerics.head_products import head_product_norms
from equipoise.numerics.tracking import tracked_norm
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.shards import is_sharded

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
        projections = projections_of(self._anatomy, call)
        if projections is None:
            return
        pairs: tuple[tuple[Letter, Letter], ...] = (("q", "k"), ("v", "o"))
        for a, b in pairs:
            a_HRD, b_HRD = projections.by_head(a), projections.by_head(b)
            found = head_product_norms(a_HRD, b_HRD, start=self._start.get((site, a)))
            emit(site, f"projection.{a}{b}", found.value_H)
            self._start[site, a] = found.start_HR


def projections_of(anatomy: Anatomy | None, call: AttentionCall) -> Projections | None:
    """Return the caller's projections, if it has any and this rank holds them whole.

    Under tensor parallelism a rank has its heads' rows only: the norm of a part is not
    a part of the norm, so there is no reading rather than a wrong one.
    """
    assert anatomy is not None
    found = anatomy.site(call.module) if call.module is not None else None
    if found is None or found.projections is None:
        return None
    weights = (getattr(found.projections, letter) for letter in "qkvo")
    held = [getattr(w.module, w.attribute, None) for w in weights]
    whole = not any(isinstance(x, Tensor) and is_sharded(x) for x in held)
    return found.projections if whole else None
