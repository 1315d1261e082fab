"""Gain of a layer's projections: their norms and products, per site and per head.

Axes, in this file:  H head · G key-value head · R head width · D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.projections import held_here, is_whole
from equipoise.anatomy.sites import Anatomy, Projections
from equipoise.numerics.spectra.tracking import head_product_norms, tracked_norm
from equipoise.probes.capture import WithAnatomy
from equipoise.probes.protocols import Emit
from equipoise.probes.sharded_norms import ALONE, LETTERS, ShardedNorms
from equipoise.probes.sharding import Parts

Start = dict[tuple[str, str], Tensor]
Letter = Literal["q", "k", "v", "o"]
COMPARED_EVERY = 4
"""Samples between two comparisons of a matrix's two vectors."""


@dataclass(slots=True)
class ProjectionGain(WithAnatomy):
    """Emit G = ‖W_O‖₂‖W_Q‖₂‖W_K‖₂‖W_V‖₂ of each attention site (Emadi 2026, §6).

    The vectors of the last sample start the next: weights move little between samples.
    In one sample of four, each matrix in its turn, it is also compared with a second
    vector, so that no norm stays with a singular value that is no longer the largest.
    Of sharded maps every rank gives its share of the products, and all together read.
    """

    name: str = "gain"
    ranks: int = 1
    """How many watch together."""
    _start: Start = field(default_factory=dict)
    _compared: Start = field(default_factory=dict)
    """Of each matrix, the relative error when it was last compared."""
    _calls: dict[tuple[str, str], int] = field(default_factory=dict)
    _sharded: ShardedNorms = field(default_factory=ShardedNorms)

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        projections = projections_of(self._anatomy, call)
        if projections is None:
            return
        if not is_whole(projections):
            self._share(site, projections, emit)
            return
        norms, errors = [], []
        for letter in LETTERS:
            found = self._tracked(site, letter, getattr(projections, letter).matrix())
            emit(site, f"projection.norm.{letter}", found[0])
            norms.append(found[0])
            errors.append(found[1])
        emit(site, "projection.G", torch.stack(norms).prod())
        emit(site, "projection.norm.error", torch.stack(errors).amax())

    def begin(self, anatomy: Anatomy) -> int:
        return self._sharded.begin(anatomy)

    def parts(self) -> Parts:
        return self._sharded.pop()

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        self._sharded.read(ranks, emit)

    def _norm(self, site: str, letter: str, matrix: Tensor) -> Tensor:
        return self._tracked(site, letter, matrix)[0]

    def _tracked(self, site: str, letter: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return a norm and the part of it that it may be off by."""
        key = site, letter
        # The letters of a site take turns, and so do the sites.
        calls = self._calls[key] = self._calls.get(key, len(self._calls)) + 1
        compare = calls if calls % COMPARED_EVERY == 0 else None
        found = tracked_norm(matrix, start=self._start.get(key), compare=compare)
        self._start[key] = found.vectors_2N
        error = found.error / torch.where(found.value == 0, 1.0, found.value)
        if compare is not None:
            self._compared[key] = error
        return found.value, torch.maximum(error, self._compared.get(key, error))

    def _share(self, site: str, projections: Projections, emit: Emit) -> None:
        if self.ranks == 1:
            emit.not_read(site, ALONE)
            return
        why = self._sharded.add(site, projections, partial(self._norm, site))
        if why is not None:
            emit.not_read(site, why)


@dataclass(slots=True)
class HeadProducts(WithAnatomy):
    """Emit per head ‖W_Q W_Kᵀ‖₂ and ‖W_V W_O‖₂: what the scores and the values see.

    The product of the factors' norms, which G uses, can exceed these by far; a head
    whose product grows while G stands still is turning, not growing.
    """

    name: str = "heads"
    _start: Start = field(default_factory=dict)

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
    """Return the maps of the heads that are on this rank, if they are complete."""
    found = projections_of(anatomy, call)
    return None if found is None else held_here(found, call.shape[1])
