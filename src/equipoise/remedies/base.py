"""What every remedy promises: it can be applied, recorded, and undone.

Undone straight after, in reverse order, weights, buffers, optimiser state and hooks are
what they were, bit for bit. Undone after further steps, structure, hooks and options
are, and what was learned stays. In another order the result is the same, or it is
refused: where a later remedy changed the same weights or options.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import (
    Annotated,
    Any,
    Protocol,
    Self,
    get_type_hints,
    runtime_checkable,
)
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import unwrapped
from equipoise.errors import InputError

Back = Callable[[], None]
Positive = Annotated[float, "positive"]
"""An option that ``RecordedRemedy`` checks when it is made."""
Count = Annotated[int, "0 or more"]


@runtime_checkable
class Remedy(Protocol):
    """One change to a model or its optimiser."""

    @property
    def name(self) -> str: ...

    @property
    def preserves_function(self) -> bool:
        """Whether the logits are the same right after it is applied."""
        ...

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> "Undo":
        """Change them now; calling the result takes it back."""
        ...


class AppliedRemedy:
    """The place of one remedy in the order of those applied; holds no model."""

    def __init__(self, name: str, touched: frozenset[object]) -> None:
        self.name, self.touched = name, touched


class Undo:
    """Takes one remedy back when called; a second call does nothing."""

    def __init__(
        self, model: nn.Module, applied: AppliedRemedy, back: list[Back]
    ) -> None:
        self.name, self.progress = applied.name, dict[str, Any]()
        """What the remedy counts while it is active; a checkpoint may carry it."""
        self.details: dict[str, str | int | float] = {}
        self._model, self._applied, self._back = model, applied, back

    @property
    def active(self) -> bool:
        return self._applied in _order(self._model)

    def __call__(self) -> None:
        if not self.active:
            return
        order = _order(self._model)
        later = order[order.index(self._applied) + 1 :]
        for other in later:
            if other.touched & self._applied.touched:
                raise InputError(
                    f"{self.name} cannot be undone yet: {other.name} was applied "
                    f"after it to the same weights or options; undo that first"
                )
        while self._back:
            self._back.pop()()
        self.forget()
        _notify(self._model, self, undone=True)

    def forget(self) -> None:
        """Keep the change for good: earlier remedies may then be undone."""
        if self.active:
            _order(self._model).remove(self._applied)


_applied: "WeakKeyDictionary[nn.Module, list[AppliedRemedy]]" = WeakKeyDictionary()
Listener = Callable[[Undo, bool], None]
# Weak: a listener (a watch handle) holds the model that is the key.
_listeners: "WeakKeyDictionary[nn.Module, weakref.WeakMethod[Any]]" = (
    WeakKeyDictionary()
)


def _order(model: nn.Module) -> list[AppliedRemedy]:
    return _applied.setdefault(unwrapped(model), [])


@contextmanager
def recording(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Call a bound method with ``(undo, undone)`` for every remedy of this model."""
    key = unwrapped(model)
    _listeners[key] = weakref.WeakMethod(listener)
    del listener
    try:
        yield
    finally:
        _listeners.pop(key, None)


def _notify(model: nn.Module, undo: Undo, *, undone: bool) -> None:
    reference = _listeners.get(unwrapped(model))
    listener = reference() if reference is not None else None
    if listener is not None:
        listener(undo, undone)


class Changes:
    """Collects what a remedy changes; if it fails half-way, nothing stays changed."""

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer | None = None
    ) -> None:
        _refuse_compiled(name, model)
        self.name, self.model, self.optimizer = name, model, optimizer
        self.progress: dict[str, Any] = {}
        self._back: list[Back] = []
        self._touched: set[object] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while error is not None and self._back:
            self._back.pop()()

    @property
    def required_optimizer(self) -> Optimizer:
        """The optimiser, or an error that says how to give it."""
        if self.optimizer is None:
            raise InputError(
                f"{self.name} acts on the optimiser: give it as well, "
                f'remedy("{self.name}").apply(model, optimizer)'
            )
        inner: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            raise InputError(
                f"{self.name} acts between backward and step, which LBFGS does not "
                "separate; use another optimiser"
            )
        return inner

    def undo_by(self, back: Back, *touched: object) -> None:
        """Add what takes a change back, and what it touches."""
        self._back.append(back)
        self._touched.update(touched)

    def hook(self, handle: RemovableHandle) -> None:
        self.undo_by(handle.remove)

    def before_step(self, act: Callable[[Optimizer], None]) -> None:
        """Call a function with the optimiser before each step, without gradients."""
        register = self.required_optimizer.register_step_pre_hook
        self.hook(register(lambda optimizer, *_: _without_gradients(act, optimizer)))

    def after_step(self, act: Callable[[Optimizer], None]) -> None:
        """Call a function with the optimiser after each step, without gradients."""
        register = self.required_optimizer.register_step_post_hook
        self.hook(register(lambda optimizer, *_: _without_gradients(act, optimizer)))

    def attribute(self, owner: object, name: str, value: object) -> None:
        """Set an attribute; undone to what it was."""
        before = getattr(owner, name)
        setattr(owner, name, value)
        self.undo_by(lambda: setattr(owner, name, before), (id(owner), name))

    def value(self, tensor: Tensor, new: Tensor) -> None:
        """Write new numbers into a parameter; undone unless it has learned since."""
        here = local_part(tensor.detach())
        before, after = here.clone(), local_part(new.detach()).clone()
        here.copy_(after)

        def back() -> None:
            if same_bits(here, after):
                here.copy_(before)

        self.undo_by(back, id(tensor))

    def parameter(self, owner: nn.Module, name: str, given: nn.Parameter) -> None:
        """Give a module a parameter that the optimiser learns too."""
        if hasattr(owner, name):
            raise InputError(f"{self.name} is applied already: undo it first")
        owner.register_parameter(name, given)
        self.undo_by(lambda: delattr(owner, name), "structure")
        _average_over_ranks(given)
        group = min(
            self.required_optimizer.param_groups,
            key=lambda g: float(g.get("weight_decay", 0.0)),
        )
        # In a group that exists: a scheduler refuses a group it does not know.
        group["params"].append(given)
        self.undo_by(lambda: self._unlearn(group, given))

    def _unlearn(self, group: dict[str, Any], given: nn.Parameter) -> None:
        group["params"][:] = [p for p in group["params"] if p is not given]
        self.required_optimizer.state.pop(given, None)

    def count_steps(self) -> None:
        """Count the optimiser's steps from now on in ``progress["step"]``."""
        self.progress["step"] = 0

        def count(optimizer: Optimizer) -> None:
            self.progress["step"] += 1

        self.after_step(count)

    def applied(self, **details: str | int | float) -> Undo:
        """Return the undo of everything collected, and record the remedy."""
        place = AppliedRemedy(self.name, frozenset(self._touched))
        _order(self.model).append(place)
        undo = Undo(self.model, place, list(self._back))
        undo.progress, undo.details = self.progress, details
        _notify(self.model, undo, undone=False)
        return undo


class RecordedRemedy(Protocol):
    """Gives a remedy its ``apply``: what ``change`` collects is recorded and undone."""

    __slots__ = ()

    @property
    def name(self) -> str: ...

    @property
    def preserves_function(self) -> bool:
        return True

    def __post_init__(self) -> None:
        for option, kind in get_type_hints(type(self), include_extras=True).items():
            value: Any = getattr(self, option, None)
            if (kind == Positive and not value > 0) or (kind == Count and value < 0):
                (rule,) = kind.__metadata__
                raise InputError(f"{option} of {self.name} must be {rule}, not {value}")

    def change(self, changes: Changes) -> Undo:
        """Change what ``changes`` holds; end with ``changes.applied``."""
        ...

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Undo:
        """Change them now; calling the result restores what was there."""
        with Changes(self.name, model, optimizer) as changes:
            return self.change(changes)


def _without_gradients(act: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    with torch.no_grad():
        act(optimizer)


def _refuse_compiled(name: str, model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule":
        raise InputError(
            f"this model is compiled: apply {name} first, then compile (to the model "
            "that torch.compile was given)"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape hold the same bits, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def ranks() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def over_ranks(x: Tensor, *, largest: bool = False) -> Tensor:
    """Return the mean, or the largest, over all ranks; each of them must ask."""
    if ranks() == 1:
        return x
    shared = x.detach().clone()
    dist.all_reduce(shared, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return shared if largest else shared / ranks()


def _average_over_ranks(parameter: nn.Parameter) -> None:
    """A parameter that came after DDP or FSDP is not in their buckets."""
    if ranks() > 1:

        def share(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.copy_(over_ranks(p.grad))

        parameter.register_post_accumulate_grad_hook(share)
