"""Gain of a layer's projections: their norms and products, per site and per head.

Axes, in this file:  H head · G key-value head · R head width · D model width · M rows
of this rank · K direction.
Projections that tensor parallelism spread over the ranks are followed by all of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from equipoise.anatomy.calls import OTHER_WEIGHTS, AttentionCall
from equipoise.anatomy.projections import (
    gathered_rows,
    held_here,
    is_whole,
    is_without_count,
    shard_of,
)
from equipoise.anatomy.sharding import WHOLE, is_sharded, local_part, stays_sharded
from equipoise.anatomy.sites import Anatomy, Projections, Reason, Weight, effective
from equipoise.numerics.spectra.sharded_norm import (
    SharedNorm,
    first_basis,
    leading_basis,
    share_of_image,
    shared_norm,
)
from equipoise.numerics.spectra.tracking import head_product_norms, tracked_norm
from equipoise.probes.protocols import Emit, WithAnatomy
from equipoise.probes.sharding import Parts, PendingParts, Shard, names, parts_by_rank

Start = dict[tuple[str, str], Tensor]
Letter = Literal["q", "k", "v", "o"]
COMPARED_EVERY = 4
"""Samples between two comparisons of a matrix's two vectors."""
LETTERS = "qkvo"
MOST_NUMBERS = 1 << 20
"""In one exchange; beyond it the sites take turns."""
LARGEST_ERROR = 0.1

UNKNOWN = Reason(
    "projections_unknown",
    hides=(
        "projection.*",
        "sensitivity.*",
        "gradient.qk",
    ),
)
HEADLESS = Reason("heads_unknown", hides=UNKNOWN.hides)
ALONE = Reason(
    "projections_apart",
    hides=(
        "projection.norm",
        "projection.G",
        "sensitivity",
        "attention.lipschitz",
    ),
)
CUT = Reason(
    "projections_split",
    hides=(
        "projection.norm",
        "projection.G",
        "sensitivity",
    ),
)
FAR = Reason(
    "norms_converging",
    hides=(
        "projection.norm",
        "projection.G",
        "sensitivity",
    ),
)


@dataclass(slots=True)
class ShardedNorms:
    """Follows ‖W‖₂ of maps of which each rank holds some rows, or some columns.

    Σᵣ AᵣᵀAᵣV of the ranks' rows travels with the other measurements of a sampled step;
    the directions V are gathered once, at attach, and turn a little with every sample.
    """

    _basis: dict[str, Tensor] = field(default_factory=dict)
    """site|letter → V."""
    _parts: PendingParts = field(default_factory=PendingParts)
    _sites: dict[str, int] = field(default_factory=dict)
    """In the order in which they were met, so that they can take turns."""
    _rotations: int = 1
    _samples: int = 0

    def begin(self, anatomy: Anatomy) -> int:
        """Find where each norm is attained, while the ranks may still be asked.

        Returns how many numbers the shares of a sample will be.
        """
        split = {id(parameter) for parameter in stays_sharded(anatomy.model)}
        numbers = 0
        for name, weight in _maps(anatomy):
            if id(getattr(weight.module, weight.attribute, None)) in split:
                rows_MD = gathered_rows(weight)
                if rows_MD is not None:
                    self._basis[name] = leading_basis(rows_MD)
                    numbers += self._basis[name].numel()
        self._rotations = max(1, math.ceil(numbers / MOST_NUMBERS))
        return math.ceil(numbers / self._rotations)

    def add(
        self, site: str, projections: Projections, norm: Callable[[str, Tensor], Tensor]
    ) -> Reason | None:
        """Keep this rank's share of a site's norms; return why not, if so.

        ``norm`` reads a map that every rank has in full.
        """
        number = self._sites.setdefault(site, len(self._sites))
        if (number + self._samples) % self._rotations:
            return None
        found = {
            name: self._part(name, getattr(projections, name[-1]), norm)
            for name in (f"{site}|{letter}" for letter in LETTERS)
        }
        if None in found.values():
            return CUT
        for name, part in found.items():
            assert part is not None
            self._parts.add(name, *part)
        return None

    def _part(
        self, name: str, weight: Weight, norm: Callable[[str, Tensor], Tensor]
    ) -> Shard | None:
        stored = effective(weight.module, weight.attribute)
        if not is_sharded(stored):
            return Shard(norm(name[-1], weight.part_of(local_part(stored))), WHOLE)
        found = shard_of(weight)
        if found is None:
            return None
        shard_MD, split = found
        share_DK = share_of_image(shard_MD, self._directions(name, shard_MD.shape[1]))
        return Shard(share_DK, split)

    def _directions(self, name: str, width: int) -> Tensor:
        """Return V; a layer that is called again has its own, from the same start."""
        if name not in self._basis:
            first = name.split("#")[0] + name[-2:] if "#" in name else ""
            self._basis[name] = self._basis.get(first, first_basis(width))
        return self._basis[name]

    def pop(self) -> Parts:
        """Return the shares since the last call, where they are."""
        self._samples += 1
        return self._parts.pop()

    def read(self, ranks: Sequence[Parts], emit: Emit) -> None:
        """Emit the norms and G of every site of which all shares are here."""
        for site in dict.fromkeys(name[:-2] for name in names(ranks)):
            found = {
                letter: self._norm(ranks, f"{site}|{letter}") for letter in LETTERS
            }
            norms = [x for x in found.values() if x is not None]
            if len(norms) < len(LETTERS):
                continue
            error = max(norm.error for norm in norms)
            emit(site, "projection.norm.error", _number(error))
            if error > LARGEST_ERROR:
                emit.not_read(site, FAR)
                continue
            for letter, norm in zip(LETTERS, norms, strict=True):
                emit(site, f"projection.norm.{letter}", _number(norm.value))
            G = math.prod(norm.value for norm in norms)
            emit(site, "projection.G", _number(G))

    def _norm(self, ranks: Sequence[Parts], name: str) -> SharedNorm | None:
        copies = parts_by_rank(ranks, name)
        if not copies:
            return None
        if copies[0][0].ndim == 0:
            return SharedNorm(float(copies[0][0]), 0.0, copies[0][0])
        found = shared_norm(self._basis[name], copies[0])
        self._basis[name] = found.basis_DK
        return found


def _maps(anatomy: Anatomy) -> list[tuple[str, Weight]]:
    return [
        (f"{site.name}|{letter}", getattr(site.projections, letter))
        for site in anatomy.attention
        if site.projections is not None
        for letter in LETTERS
    ]


def _number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


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
            emit.not_read(site, _unknown(self._anatomy, call))
        if projections is None or call.kind == OTHER_WEIGHTS:
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


def _unknown(anatomy: Anatomy | None, call: AttentionCall) -> Reason:
    """Return why a caller's projections are not known.

    A module whose maps have names of projections is a site; what it lacks is its heads.
    """
    assert anatomy is not None
    found = anatomy.site(call.module) if call.module is not None else None
    headless = found is not None and is_without_count(found.module)
    return HEADLESS if headless else UNKNOWN


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
