"""Spectral norms of projections that tensor parallelism spread over the ranks.

Axes, in this file:  M rows of this rank · D the width they share · K direction.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.anatomy.projections import gathered_rows, shard_of
from equipoise.anatomy.sharding import WHOLE, is_sharded, local_part, stays_sharded
from equipoise.anatomy.sites import Anatomy, Projections, Weight, effective
from equipoise.numerics.spectra.sharded_norm import (
    SharedNorm,
    first_basis,
    leading_basis,
    share_of_image,
    shared_norm,
)
from equipoise.probes.protocols import Emit
from equipoise.probes.sharding import Part, Parts, PendingParts, names, parts_by_rank

LETTERS = "qkvo"
MOST_NUMBERS = 1 << 20
"""In one exchange; beyond it the sites take turns."""
LARGEST_ERROR = 0.1

ALONE = (
    "its weights are sharded over tensor-parallel ranks and this rank watches alone: "
    "projection.norm, projection.G, sensitivity and attention.lipschitz are not read"
)
CUT = (
    "a projection is sharded both ways, or through the rows of a fused map, or carries "
    "adapters: projection.norm, projection.G and sensitivity are not read"
)
FAR = (
    "its sharded projections' norms are followed by one step a sample and are not "
    "within a tenth yet: projection.norm, projection.G and sensitivity wait for that"
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
    ) -> str | None:
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
    ) -> Part | None:
        stored = effective(weight.module, weight.attribute)
        if not is_sharded(stored):
            return Part(norm(name[-1], weight.part_of(local_part(stored))), WHOLE)
        found = shard_of(weight)
        if found is None:
            return None
        shard_MD, split = found
        share_DK = share_of_image(shard_MD, self._directions(name, shard_MD.shape[1]))
        return Part(share_DK, split)

    def _directions(self, name: str, width: int) -> Tensor:
        """Return V; a layer that is called again has its own, from the same start."""
        if name not in self._basis:
            first = name.split("#")[0] + name[-2:] if "#" in name else ""
            self._basis[name] = self._basis.get(first, first_basis(width))
        return self._basis[name]

    def pop(self) -> Parts:
        """Return the shares since the last call, on the host."""
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
