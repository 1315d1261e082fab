"""Run a model as if some of its modules stored their numbers in a narrow format.

Sums are wide, storage is narrow: each stored result and each parameter read is rounded
once. Modules kept in fp32 round nothing, and pass on what they computed unrounded.

The reference runs in float64 (never in TF32: its 11 bits equal fp16's, and a reference
that wrong hides two fifths of the error). Emulated runs use the same float64 model with
rounding added, so the only difference is the one under study.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.auditing.precision.walk import LinearCall, walked
from equipoise.auditing.subject import Batch, batch_as, output_of, widened
from equipoise.errors import InputError
from equipoise.numerics.formats import Format, format_named
from equipoise.numerics.rounding import PIECE, power_of_two_scale, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a narrow module stores its numbers."""

    format: Format
    scaled: bool | None = None
    """Scale each tensor by a power of two to fill the range, as fp8 recipes do.
    None: only for formats of 8 bits or fewer."""
    fused: bool = False
    """Attention that a model calls fused stores no scores, as its kernel does not;
    else it is opened like attention that is written out."""
    narrow_products: bool = False
    """Products of matrices read narrow numbers only, in modules kept in fp32 too."""

    @classmethod
    def named(cls, name: str, **options: Any) -> Self:
        """Return the storage of a format by its name; options are its fields."""
        return cls(format=format_named(name), **options)

    def stores(self, kind: str) -> bool:
        """Return whether a result of some kind is stored at all."""
        return not (self.fused and kind == "score")

    @property
    def scales(self) -> bool:
        return self.format.bits <= 8 if self.scaled is None else self.scaled

    def rounded(self, x: Tensor) -> Tensor:
        """Return x as stored."""
        return self.rounded_with(x, self.scale(x))

    def scale(self, x: Tensor) -> float:
        """Return the power of two the tensor is stored with."""
        return power_of_two_scale(x, self.format) if self.scales else 1.0

    def rounded_with(self, x: Tensor, scale: float) -> Tensor:
        """Return x as stored with a given scale."""
        if scale == 1.0:
            near = rounded(x, self.format)
            return near if near is not x else x.clone()
        return rounded(x * scale, self.format).div_(scale)


Narrow = Callable[[str], bool]
Memory = dict[tuple[Storage, int], Tensor]
"""Parameters already rounded, by ``id``: valid while the model is unchanged."""


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
        read = self.storage.narrow_products and kind in ("score", "prob", "mix")
        narrow = (read or self.narrow(site)) and self.storage.stores(kind)
        return self._round(x) if narrow else x

    def operand(self, x: Tensor) -> Tensor:
        return self._round(x) if self.storage.narrow_products else x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        # Rounding the rows read is cheaper than the table, and the same.
        return self.stored(site, "weight", nn.functional.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        weight_MK = self.operand(self.parameter(site, call.weight))
        bias = call.bias
        if isinstance(bias, nn.Parameter):
            bias = self.operand(self.parameter(site, bias))
        x = self.operand(call.x)
        y = nn.functional.linear(x, call.oriented(weight_MK), bias)
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


def relative_error(found: Tensor, exact: Tensor, *, size: float | None = None) -> float:
    """Return ‖found - exact‖/‖exact‖ in float64; NaN and Inf stay.

    ``size`` is ‖exact‖, where it is known.
    """
    size = norm_of(exact) if size is None else size
    return norm_of(found, exact) / size if size else math.nan


def norm_of(x: Tensor, less: Tensor | None = None) -> float:
    """Return ‖x‖ or ‖x - less‖ in float64, without a wide copy of a large tensor."""
    pieces = x.reshape(-1).split(PIECE)
    others = [None] * len(pieces) if less is None else less.reshape(-1).split(PIECE)
    norms = [
        (a.double() if b is None else a.double() - b.double()).norm()
        for a, b in zip(pieces, others, strict=True)
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0


NARROW_ENOUGH = 11
"""Bits of a significand, fp16's: float32 rounds such numbers wrongly once in 1e3."""
LOST = 0.01
"""Of a target: a deviation so small decides nothing."""
NATIVE = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
    }
)


class _WideProducts(TorchDispatchMode):
    """Have a CPU multiply 16-bit matrices in float32 and round the result once.

    That is what a native kernel does, up to the order of its sums; one that emulates
    the instructions takes forty times as long where the CPU has none for bfloat16.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        last: Tensor = args[-1]
        if not last.is_cpu or last.dtype not in _NARROW:
            return func(*args, **kwargs)
        return func(*(x.float() for x in args), **kwargs).to(last.dtype)


_NARROW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Bench:
    """A model and a batch, ready to be run in any precision."""

    model: nn.Module
    batch: Batch
    wide: torch.dtype = torch.float64
    _wide_model: nn.Module = field(init=False)
    _wide_batch: Batch = field(init=False)
    _memory: Memory = field(init=False, default_factory=dict)
    _errors: dict[tuple[Storage, frozenset[str]], float] = field(
        init=False, default_factory=dict
    )
    _near: dict[tuple[Storage, frozenset[str]], float] = field(
        init=False, default_factory=dict
    )
    _narrower: tuple[nn.Module, Batch] | None = field(init=False, default=None)
    _deviation: float | None = field(init=False, default=None)
    _size: float = field(init=False)
    reference: Tensor = field(init=False)
    """The output in the wide dtype."""

    def __post_init__(self) -> None:
        self._wide_model = widened(self.model, self.wide)
        self._wide_batch = batch_as(self.batch, self.wide)
        with torch.no_grad():
            self.reference = output_of(self._wide_model, self._wide_batch)
        if not self.reference.isfinite().all():
            raise InputError(
                "the model's output is not finite even in float64: there is no "
                "reference to compare low precision with"
            )
        self._size = norm_of(self.reference)

    @property
    def widened(self) -> tuple[nn.Module, Batch]:
        """Return the copy that is measured, and its batch."""
        return self._wide_model, self._wide_batch

    def mismatch(self, storage: Storage, *, narrow: Narrow = everywhere) -> float:
        """Return ‖y_narrow - y‖/‖y‖ with the narrow modules emulated."""
        with emulated(self._wide_model, storage, narrow=narrow, memory=self._memory):
            return self._error_of(*self.widened)

    def keeping(self, storage: Storage, kept: Iterable[str] = ()) -> float:
        """Return the mismatch with all modules narrow but some; measured once each."""
        key = (storage, frozenset(kept))
        if key not in self._errors:
            self._errors[key] = self.mismatch(storage, narrow=all_but(key[1]))
        return self._errors[key]

    def nearly_keeping(self, storage: Storage, kept: Iterable[str] = ()) -> float:
        """Return the same with sums in float32: in half the time, right to 1 %."""
        key = (storage, frozenset(kept))
        if key in self._errors:
            return self._errors[key]
        if key not in self._near:
            model, batch = self._quick()
            narrow = all_but(key[1])
            with emulated(model, storage, narrow=narrow, memory=self._memory):
                self._near[key] = self._error_of(model, batch)
        return self._near[key]

    def settles(self, storage: Storage, target: float) -> bool:
        """Return whether sums in float32 are exact enough to compare with a target.

        Their own deviation, with nothing rounded, must be lost in it; and formats near
        float32 itself need the wide sums.
        """
        if storage.format.significand > NARROW_ENOUGH:
            return False
        if self._deviation is None:
            self._deviation = self._error_of(*self._quick())
        return self._deviation <= LOST * target

    def _quick(self) -> tuple[nn.Module, Batch]:
        if self._narrower is None:
            batch = batch_as(self.batch, torch.float32)
            self._narrower = (widened(self.model, torch.float32), batch)
        return self._narrower

    def _error_of(self, model: nn.Module, batch: Batch) -> float:
        with torch.no_grad():
            return relative_error(
                output_of(model, batch), self.reference, size=self._size
            )

    def sites(self, storage: Storage) -> tuple[str, ...]:
        """Return the modules that store anything, in the order they first do."""
        with torch.no_grad(), emulated(self._wide_model, storage) as sites:
            output_of(self._wide_model, self._wide_batch)
        return tuple(sites)

    def by_module(
        self, storage: Storage, sites: Iterable[str] | None = None
    ) -> dict[str, float]:
        """Return the mismatch with one module narrow at a time: the attribution."""
        chosen = self.sites(storage) if sites is None else sites
        return {s: self.mismatch(storage, narrow=only({s})) for s in chosen}

    def native_mismatch(self, format: Format) -> float:
        """Return the mismatch of the model cast to the device's own dtype."""
        dtype = NATIVE.get(format.name)
        if dtype is None:
            raise InputError(
                f"{format.name} has no dtype every layer runs in; "
                f"native runs exist for {', '.join(NATIVE)}"
            )
        cast = (widened(self.model, dtype), batch_as(self.batch, dtype))
        with _WideProducts():  # type: ignore[no-untyped-call]
            return self._error_of(*cast)

    def gradient_mismatch(self, storage: Storage) -> dict[str, float]:
        """Return, per parameter, the relative error of a gradient in low precision.

        The scalar differentiated is a fixed random projection of the output, so no
        labels are needed. Weights, activations and gradients are all rounded.
        """
        exact = self._gradients()
        with emulated(self._wide_model, storage, gradients=True):
            found = self._gradients()
        return {
            name: relative_error(found[name], g)
            for name, g in exact.items()
            if name in found and bool((g != 0).any())
        }

    def _gradients(self) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(0)
        probe = torch.randn(self.reference.shape, generator=rng).to(self.reference)
        with torch.enable_grad():
            y = output_of(self._wide_model, self._wide_batch)
            wanted = {
                n: p for n, p in self._wide_model.named_parameters() if p.requires_grad
            }
            grads = torch.autograd.grad(
                (y * probe).sum(), list(wanted.values()), allow_unused=True
            )
        return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
