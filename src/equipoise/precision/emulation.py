"""Run a model as if some of its modules stored their numbers in a narrow format.

Sums are wide, storage is narrow: each stored result and each parameter read is rounded
once. Kept modules store nothing narrow, and hand on what they computed unrounded.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from equipoise.numerics.formats import Format, format_named
from equipoise.numerics.rounding import power_of_two_scale, rounded
from equipoise.precision.operations import HIDDEN, plain
from equipoise.precision.walk import LinearCall, walked


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a narrow module stores its numbers."""

    format: Format
    scaled: bool | None = None
    """Scale each tensor by a power of two to fill the range, as fp8 recipes do.
    None: only for formats of 8 bits or fewer."""

    @classmethod
    def named(cls, name: str, *, scaled: bool | None = None) -> Self:
        """Return the storage of a format by its name."""
        return cls(format=format_named(name), scaled=scaled)

    @property
    def scales(self) -> bool:
        return self.format.bits <= 8 if self.scaled is None else self.scaled

    def rounded(self, x: Tensor) -> Tensor:
        """Return x as stored; numbers that hide keys pass through."""
        numbers = plain(x)
        near = self.rounded_plain(numbers, self.scale(numbers))
        return near if numbers is x else torch.where(x.abs() >= HIDDEN, x, near)

    def scale(self, x: Tensor) -> float:
        """Return the power of two the tensor is stored with."""
        return power_of_two_scale(x, self.format) if self.scales else 1.0

    def rounded_plain(self, x: Tensor, scale: float) -> Tensor:
        """Return x as stored with a given scale, hidden keys not looked for."""
        if scale == 1.0:
            near = rounded(x, self.format)
            return near if near is not x else x.clone()
        return rounded(x * scale, self.format).div_(scale)


Narrow = Callable[[str], bool]
Memory = dict[tuple[Storage, int], Tensor]
"""Parameters already rounded, by ``id``: valid while the model lives unchanged."""


def everywhere(site: str) -> bool:
    """Every module is narrow."""
    return True


def all_but(kept: Collection[str]) -> Narrow:
    """Every module is narrow except those kept."""
    return lambda site: site not in kept


def only(sites: Collection[str]) -> Narrow:
    """Only the named modules are narrow."""
    return lambda site: site in sites


@dataclass(slots=True)
class _Rounding:
    storage: Storage
    narrow: Narrow
    straight_through: bool
    memory: Memory
    sites: dict[str, None] = field(default_factory=dict)

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        self.sites[site] = None
        if not self.narrow(site):
            return parameter
        if self.straight_through:  # each use needs a history of its own
            return self._round(parameter)
        key = (self.storage, id(parameter))
        if key not in self.memory:
            self.memory[key] = self._round(parameter)
        return self.memory[key]

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        self.sites[site] = None
        return self._round(x) if self.narrow(site) else x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        # Rounding the rows read is cheaper than the table, and the same.
        return self.stored(site, "weight", nn.functional.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        weight_MK = self.parameter(site, call.weight)
        bias = call.bias
        if isinstance(bias, nn.Parameter):
            bias = self.parameter(site, bias)
        y = nn.functional.linear(call.x, call.oriented(weight_MK), bias)
        return self.stored(site, "product", y)

    def _round(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            near = self.storage.rounded(x.detach())
        if not (self.straight_through and x.requires_grad):
            return near
        # Rounding has slope 1 almost everywhere that matters; gradients are stored too.
        y = x + (near - x).detach()
        y.register_hook(self.storage.rounded)
        return y


@contextmanager
def emulated(
    model: nn.Module,
    storage: Storage,
    *,
    narrow: Narrow = everywhere,
    gradients: bool = False,
    memory: Memory | None = None,
) -> Iterator[dict[str, None]]:
    """Round what the narrow modules store inside the block; yield the sites seen.

    Args:
        model: in float32 or, better, float64: sums are as wide as its dtype.
        storage: the format, and whether tensors are scaled to fill it.
        narrow: which modules, by name; all of them by default.
        gradients: let gradients through the rounding, and round them as well.
        memory: keeps rounded parameters from one run to the next.
    """
    rounding = _Rounding(storage, narrow, gradients, {} if memory is None else memory)
    with walked(model, rounding):
        yield rounding.sites


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return ‖found - exact‖/‖exact‖ in float64; NaN and Inf are told as they are."""
    wide = exact.double()
    size = float(wide.norm())
    return float((found.double() - wide).norm()) / size if size else math.nan
