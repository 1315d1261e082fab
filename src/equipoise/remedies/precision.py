"""Keep named modules in float32 while the rest of a model is narrow.

A kept module computes its own operations in float32 and leaves its output wide: what
reads it rounds its own results, not what it reads. A name means the module's own
operations and parameters; its children are narrow unless they are named too, so that
``blocks.0`` keeps the residual sums of that block and not its matrices. This is what
``equipoise precision`` predicts the error of.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.discovery import NORMS
from equipoise.anatomy.operations import (
    FUSED,
    Function,
    Role,
    leaves,
    mapped,
    name_of,
    role_of,
    writes,
)
from equipoise.anatomy.sites import named
from equipoise.errors import InputError
from equipoise.remedies.base import Changes, RecordedRemedy, Undo, same_bits
from equipoise.remedies.losses import output_module

NARROW = (torch.bfloat16, torch.float16)
CASTS = frozenset("to type type_as half bfloat16".split())
ASKS = frozenset(
    "__get__ __set__ __delete__ register_hook retain_grad backward requires_grad_ "
    "register_post_accumulate_grad_hook".split()
)


@dataclass(slots=True)
class Running:
    """Whether each of the modules that are running is kept, innermost last."""

    dtype: torch.dtype
    narrow_products: bool = False
    shared: list[nn.Parameter] = field(default_factory=list)
    """Wide parameters that narrow modules read too."""
    stack: list[bool] = field(default_factory=list)
    modes: list["KeptOperations"] = field(default_factory=list)


@dataclass(slots=True)
class Followed:
    """Knows when one module runs; a kept one gets what it reads wide."""

    running: Running
    keeps: bool

    def enter(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        running = self.running
        if not running.stack:
            running.modes.append(KeptOperations(running))
            running.modes[-1].__enter__()  # type: ignore[no-untyped-call]
        running.stack.append(self.keeps)
        if not self.keeps:
            return args, kwargs
        return mapped(args, _wide), mapped(kwargs, _wide)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self.running
        running.stack.pop()
        if not running.stack:
            mode = running.modes.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class KeptOperations(TorchFunctionMode):
    """Runs each operation in the precision of the module that makes it."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.running.stack or not _computes(func):
            return func(*args, **kwargs)
        if self.running.stack[-1]:
            return self._kept(func, args, kwargs)
        return self._narrow(func, args, kwargs)

    def _kept(self, func: Function, args: Any, kwargs: Any) -> Any:
        read = [x for x in leaves([args, kwargs]) if _is_float(x)]
        if name_of(func) in CASTS:  # no cast back, though the module writes one
            made = func(*args, **kwargs)
            narrowed = isinstance(made, Tensor) and made.dtype in NARROW
            return _wide(read[0]) if narrowed and read else made
        narrows = self.running.narrow_products and _multiplies(func)
        if narrows and func in FUSED:
            return self._fused(func, args, kwargs)
        if narrows:
            args, kwargs = mapped([args, kwargs], self._operand)
        elif not any(x.dtype in NARROW for x in read) and not _autocasts(read):
            return func(*args, **kwargs)
        device = read[0].device.type
        with torch.autocast(device, enabled=False):
            return func(*mapped(args, _wide), **mapped(kwargs, _wide))

    def _narrow(self, func: Function, args: Any, kwargs: Any) -> Any:
        """Numbers of both widths are multiplied or added wide, and stored narrow."""
        if self.running.shared:
            args, kwargs = mapped([args, kwargs], self._read_narrow)
        read = [x for x in leaves([args, kwargs]) if _is_float(x)]
        widths = {x.dtype for x in read}
        mixed = self.running.dtype in widths and torch.float32 in widths
        if not mixed or name_of(func) in CASTS or _autocasts(read):
            return func(*args, **kwargs)
        narrows = self.running.narrow_products and _multiplies(func)
        if func in FUSED and {x.dtype for x in read[:3]} == {self.running.dtype}:
            return func(*mapped(args, self._as_mask), **mapped(kwargs, self._as_mask))
        if narrows and func in FUSED:
            return self._fused(func, args, kwargs)
        if narrows:
            return func(*mapped(args, self._stored), **mapped(kwargs, self._stored))
        made = func(*mapped(args, _wide), **mapped(kwargs, _wide))
        return mapped(made, self._stored)

    def _fused(self, func: Function, args: Any, kwargs: Any) -> Any:
        """Attention in one kernel reads narrow numbers, and stores narrow ones."""
        device = next(x for x in leaves([args, kwargs]) if _is_float(x)).device.type
        with torch.autocast(device, enabled=False):
            return func(*mapped(args, self._as_mask), **mapped(kwargs, self._as_mask))

    def _operand(self, x: Tensor) -> Tensor:
        """Return a matrix as a product reads it, in float32 for the sum to be wide.

        A GPU has kernels for narrow matrices and a wide result (``out_dtype`` of
        torch.mm); a CPU multiplies the same numbers in float32.
        """
        return x.to(self.running.dtype)

    def _read_narrow(self, x: Tensor) -> Tensor:
        """Return a parameter that another module keeps wide as this one stores it."""
        shared = any(x is parameter for parameter in self.running.shared)
        return x.to(self.running.dtype) if shared else x

    def _as_mask(self, x: Tensor) -> Tensor:
        """Return a mask in the queries' dtype; what hides stays finite."""
        if x.dtype is not torch.float32:
            return x
        return x.clamp(min=torch.finfo(self.running.dtype).min).to(self.running.dtype)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.running.dtype) if x.dtype is torch.float32 else x


def _computes(func: Function) -> bool:
    """Return whether a call makes new numbers: no attribute, no view, no writing.

    A call that writes into what it reads must get the very tensor, not a wide copy.
    """
    name = getattr(func, "__name__", "")
    if name in ASKS or writes(func):
        return False
    return name_of(func) in CASTS or role_of(func) not in (Role.RESHAPE, Role.SLICE)


def _multiplies(func: Function) -> bool:
    return func in FUSED or role_of(func) in (Role.PRODUCT, Role.PROJECTION)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _autocasts(read: list[Tensor]) -> bool:
    return bool(read) and torch.is_autocast_enabled(read[0].device.type)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in NARROW else x


def usually_kept(model: nn.Module) -> list[str]:
    """Return the norms and the output map: kept where no module is named."""
    head = output_module(model)
    return [
        name
        for name, module in named(model)
        if type(module).__name__.endswith(NORMS) or (module is head and name)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFp32(RecordedRemedy):
    """Keep modules in float32, for good; the rest becomes ``narrow`` if that is given.

    Without ``narrow`` the model stays in the dtype it has: under autocast the kept
    modules leave it, and in a narrow model their parameters are widened.
    """

    modules: Sequence[str] | None = None
    """Names from ``equipoise precision``; norms and the output map by default."""
    narrow: torch.dtype | None = None
    """``torch.bfloat16`` or ``torch.float16``: cast every other parameter to it."""
    narrow_products: bool = False
    """No product of matrices reads a float32 number: what is read is rounded first, a
    kept module leaves its sum wide. Costs no float32 multiplication."""
    name: ClassVar[str] = "keep_fp32"
    # In a narrow model the kept modules lose their rounding, on purpose.
    preserves_function: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.narrow is not None and self.narrow not in NARROW:
            raise InputError(f"narrow={self.narrow}: bfloat16 or float16")

    def change(self, changes: Changes) -> Undo:
        model, chosen = changes.model, self.modules
        found = dict(named(model))
        names = usually_kept(model) if chosen is None else list(chosen)
        unknown = sorted(set(names) - set(found))
        if unknown:
            raise InputError(
                f"no module called {', '.join(unknown)} to keep in fp32; names are "
                "those of model.named_modules()"
            )
        running = Running(self.narrow or _dtype(model), self.narrow_products)
        wide = {id(p) for n in names for p in _own_parameters(found, n)}
        for name, module in found.items():
            _follow(changes, module, Followed(running, name in names))
        for parameter in model.parameters():
            self._cast(changes, parameter, wide=id(parameter) in wide)
        if self.narrow is not None:
            rest = (m for n, m in found.items() if n not in names)
            read = (p for m in rest for p in m.parameters(recurse=False))
            running.shared += [p for p in read if id(p) in wide]
        return changes.applied(modules=len(names))

    def _cast(self, changes: Changes, parameter: nn.Parameter, *, wide: bool) -> None:
        if wide and parameter.dtype in NARROW:
            _recast(changes, parameter, torch.float32)
        elif not wide and self.narrow and parameter.dtype is torch.float32:
            _recast(changes, parameter, self.narrow)


def _own_parameters(
    found: Mapping[str, nn.Module], name: str
) -> Iterator[nn.Parameter]:
    """Yield what a module reads itself: a model without a head reads an embedding."""
    module = found[name]
    yield from module.parameters(recurse=False)
    if not name and output_module(module) is module:
        for other in module.modules():
            if isinstance(other, nn.Embedding):
                yield from other.parameters()


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the narrow dtype of a model; bfloat16 where it has none (autocast)."""
    found = (p.dtype for p in model.parameters() if p.dtype in NARROW)
    return next(found, torch.bfloat16)


def _follow(changes: Changes, module: nn.Module, followed: Followed) -> None:
    changes.hook(module.register_forward_pre_hook(followed.enter, with_kwargs=True))
    changes.hook(module.register_forward_hook(followed.leave, always_call=True))


def _recast(changes: Changes, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Change a parameter's dtype in place, and that of its moments."""
    before = parameter.data
    after = before.to(dtype)
    parameter.data = after
    optimizer = changes.optimizer
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    moments = {
        key: x
        for key, x in state.items()
        if isinstance(x, Tensor) and x.shape == before.shape
    }
    cast = {key: x.to(dtype) for key, x in moments.items()}
    state.update(cast)
    untouched = after.clone()

    def back() -> None:
        same = same_bits(parameter.data, untouched)
        parameter.data = before if same else parameter.data.to(before.dtype)
        for key, old in moments.items():
            now = state.get(key)
            if same and now is cast[key]:
                state[key] = old
            elif now is not None:
                state[key] = now.to(old.dtype)

    changes.undo_by(back, id(parameter))


@contextmanager
def kept_in_fp32(
    model: nn.Module,
    modules: Sequence[str] | None = None,
    *,
    narrow: torch.dtype | None = None,
    narrow_products: bool = False,
) -> Iterator[None]:
    """Keep modules in float32 for the length of a block."""
    kept = KeepFp32(modules=modules, narrow=narrow, narrow_products=narrow_products)
    undo = kept.apply(model)
    try:
        yield
    finally:
        undo()
