"""Hooks into the training loop: losses, clipping norms, gradient scalers, tracing.

Losses and norms are read where torch itself handles them, so a loop needs no edit. The
patches exist only while a model is watched; nothing here synchronises the device. What
torch.compile traces never runs again as Python: a function marked constant is really
called while tracing, and leaves nothing in the graph, so it can report the tracing.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import is_
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary


class LoopListener(Protocol):
    """Something that follows a training loop from the outside."""

    def before_backward(self, loss: Tensor, root: Tensor) -> None: ...

    def after_backward(self, loss: Tensor, scale: Tensor | None) -> None: ...

    def before_clipping(self, part: Tensor, parameters: object) -> None: ...

    def after_scaler_update(self) -> None: ...

    def before_update(self, optimizer: Optimizer, *, closure: bool) -> None: ...

    def after_update(self, optimizer: Optimizer) -> None: ...


# Weak: a handle that was dropped must not keep its model alive.
_active_listeners: "list[weakref.ref[LoopListener]]" = []
_originals: dict[str, Callable[..., Any]] = {}
# What GradScaler returned → the loss it was given, and the factor. Weak: a scaled loss
# dies with its step.
_unscaled: Any = WeakTensorKeyDictionary()


@contextmanager
def listening_to_loop(listener: LoopListener) -> Iterator[None]:
    """Call the listener with losses and clipping norms for the length of the block."""
    mine = weakref.ref(listener)
    del listener
    if not _active_listeners:
        _patch()
    _active_listeners.append(mine)
    try:
        yield
    finally:
        _active_listeners[:] = [
            other for other in _active_listeners if other is not mine
        ]
        if not _active_listeners:
            _restore()


def _listeners() -> list[LoopListener]:
    return [listener for reference in _active_listeners if (listener := reference())]


def _patch() -> None:
    _originals["backward"] = torch.autograd.backward
    # clip_grad_norm_ looks this up when called, however the user imported it.
    _originals["clip"] = clip_grad._clip_grads_with_norm_
    _originals["scale"] = torch.amp.GradScaler.scale
    _originals["update"] = torch.amp.GradScaler.update
    _originals["before"] = register_optimizer_step_pre_hook(_before_update).remove
    _originals["after"] = register_optimizer_step_post_hook(_after_update).remove
    torch.autograd.backward = _backward
    clip_grad._clip_grads_with_norm_ = _clip  # type: ignore[assignment]
    torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler.update = _update  # type: ignore[method-assign, assignment]


def _restore() -> None:
    _originals.pop("before")()
    _originals.pop("after")()
    torch.autograd.backward = _originals.pop("backward")
    clip_grad._clip_grads_with_norm_ = _originals.pop("clip")
    torch.amp.GradScaler.scale = _originals.pop("scale")  # type: ignore[method-assign]
    torch.amp.GradScaler.update = _originals.pop("update")  # type: ignore[method-assign]


def _before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before the step of any optimiser."""
    if torch.compiler.is_compiling():
        return
    # The first argument is the optimiser; a closure runs the pass inside the step.
    closure = any(map(callable, (*args[1:], *kwargs.values())))
    for listener in _listeners():
        listener.before_update(optimizer, closure=closure)


def _after_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch after the step of any optimiser."""
    if torch.compiler.is_compiling():
        return
    for listener in _listeners():
        listener.after_update(optimizer)


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    root = _root(tensors)
    if root is None or torch.compiler.is_compiling():
        return _originals["backward"](tensors, *args, **kwargs)
    loss, scale = _unscaled.get(root, (root, None))
    # A copy: the loop may divide or accumulate into its loss in place afterwards.
    loss = loss.detach().clone()
    for listener in _listeners():
        listener.before_backward(loss, root)
    done = _originals["backward"](tensors, *args, **kwargs)
    for listener in _listeners():
        listener.after_backward(loss, scale)
    return done


def _root(tensors: Any) -> Tensor | None:
    """Return the one scalar a backward pass starts from, if it is that kind."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        tensors = tensors[0]
    return tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None


def _clip(parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any) -> Any:
    for listener in _listeners():
        listener.before_clipping(total_norm.detach().clone(), parameters)
    return _originals["clip"](parameters, max_norm, total_norm, *rest)


def _scale(scaler: Any, outputs: Any) -> Any:
    scaled = _originals["scale"](scaler, outputs)
    if isinstance(scaled, Tensor) and scaled is not outputs:
        _unscaled[scaled] = (outputs.detach(), scaler._scale)
    return scaled


def _update(scaler: Any, *args: Any, **kwargs: Any) -> None:
    _originals["update"](scaler, *args, **kwargs)
    for listener in _listeners():
        listener.after_scaler_update()


MARKED = 16
"""Parameters looked at to tell whether a backward pass reached the model."""


class StepLosses:
    """Collects a step's losses, not those of another model (a teacher's, a critic's).

    A backward pass that changed the gradient of no parameter we look at is another
    model's. Where none seems to be this one's (all the marked parameters are unused),
    all count. Gradients that were cleared begin anew: what was lost with them (an
    evaluation of LBFGS's closure, a batch whose step was left out) does not count.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._new_state = optimizer is not None and not optimizer.state
        self._clipped: dict[frozenset[int], Tensor] = {}
        """Ids of parameters that were clipped in this step → their norm."""
        self.mark(model)
        self._before: list[object] = []
        self._weights: list[int] = []
        self.ever_reached_model = False
        self.cleared = 0
        """Batches whose gradients were cleared without a step."""
        self.weights_moved = False
        """Whether weights changed between the last two backward passes."""
        self._own: Tensor | None = None
        self._others: Tensor | None = None
        self.running: Tensor | None = None
        """The loss whose backward pass is under way."""

    def mark(self, model: nn.Module) -> None:
        """Choose the parameters to look at."""
        self._model = weakref.ref(model)
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._marked = trainable[:: max(1, len(trainable) // MARKED)]

    @property
    def reached_model(self) -> bool:
        """Whether a backward pass of this step reached the model."""
        return self._own is not None

    @property
    def step_is_over(self) -> bool:
        """Whether the next step's gradients are still to come."""
        return self.ever_reached_model and not self.reached_model

    def before_backward(self, loss: Tensor, *, in_closure: bool) -> None:
        self._before, self.running = self._state(), loss
        self.cleared += self.reached_model and not (in_closure or any(self._before))
        if not any(self._before) or (in_closure and self._all_zero()):
            self._own = self._others = None
        self.weights_moved = self.moved_since()
        self._weights = [p._version for p in self._marked]

    def moved_since(self) -> bool:
        """Return whether weights changed after the last backward pass that was seen."""
        weights = [p._version for p in self._marked]
        return bool(self._weights) and weights != self._weights

    def unseen_step(self, optimizer: Optimizer | None) -> bool:
        """Return whether an optimiser has stepped since watching began, seen or not."""
        stepped = optimizer is not None and bool(optimizer.state)
        # State alone says little of a step that raised, once gradients were seen.
        return stepped and (self.moved_since() if self._weights else self._new_state)

    def clipped(
        self, norm: Tensor, parameters: object, optimizer: Optimizer | None
    ) -> Tensor | None:
        """Return the norm of all that was clipped in this step; of another model none.

        Who clips layer by layer clips parts of one gradient; of what is clipped twice
        the last norm counts.
        """
        some = [parameters] if isinstance(parameters, Tensor) else parameters
        if not isinstance(some, list | tuple):  # a generator must not be used up
            return norm
        ids = frozenset(map(id, some))
        model = self._model()
        groups = optimizer.param_groups if optimizer is not None else ()
        copies = (p for group in groups for p in group["params"])
        own = model.parameters() if model is not None else ()
        if ids and not any(id(p) in ids for p in chain(own, copies)):
            return None
        others = {k: v for k, v in self._clipped.items() if k.isdisjoint(ids)}
        self._clipped = {**others, ids: norm}
        return norm if not others else _joined([*self._clipped.values()])

    def after_backward(self, loss: Tensor) -> bool:
        """Add a loss, and return whether its backward pass reached the model."""
        reached = self._state() != self._before or self._replaced()
        self.ever_reached_model = self.ever_reached_model or reached
        if self.running is None:  # an optimiser stepped inside the backward pass
            return reached
        self.running = None
        if reached:
            self._own = _added(self._own, loss)
        else:
            self._others = _added(self._others, loss)
        return reached

    def _replaced(self) -> bool:
        """Return whether the model has other parameters now, and they have gradients.

        Weights are assigned, not copied, by ``load_state_dict(assign=True)``.
        """
        marked, model = self._marked, self._model()
        if model is not None:
            self.mark(model)
        same = len(marked) == len(self._marked) and all(map(is_, marked, self._marked))
        return not same and any(self._state())

    def pop(self) -> Tensor | None:
        """Return the step's objective, the sum over its micro-batches."""
        total = self._others if self._own is None else self._own
        total = self.running if total is None else total
        self._own = self._others = self.running = None
        self._clipped = {}
        return total

    def _state(self) -> list[object]:
        return [_mark(p.grad) for p in self._marked]

    def _all_zero(self) -> bool:
        """Return whether gradients were cleared in place: only asked in closures."""
        return not any(bool(p.grad.any()) for p in self._marked if p.grad is not None)


def _joined(norms: list[Tensor]) -> Tensor:
    """Return the norm of all; of DTensors, which the ranks hold in parts, the last."""
    if any(type(norm) is not Tensor for norm in norms):
        return norms[-1]
    wide = torch.promote_types(norms[-1].dtype, torch.float32)
    together = torch.stack([norm.to(norms[-1].device, wide) for norm in norms])
    joined: Tensor = torch.linalg.vector_norm(together)
    return joined


def _added(total: Tensor | None, loss: Tensor) -> Tensor:
    return loss if total is None else total + loss.to(total.device)


def _mark(grad: Tensor | None) -> tuple[int, int] | None:
    # The version counts writes in place; the identity changes when one is first made.
    return None if grad is None else (id(grad), grad._version)


Hook = Callable[[Optimizer, Any, Any], None]
Relation = Literal["same parameters", "same model", "another model", "wrapper"]


class Relations:
    """How other optimisers relate to the one whose steps count, and to its model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._hooks = model, ExitStack()
        self._known: weakref.WeakKeyDictionary[Optimizer, Relation] = (
            weakref.WeakKeyDictionary()
        )
        self._began: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """At which step the step of an optimiser under way began."""
        self._trains = False
        """Whether the counted optimiser held parameters of the model."""

    def begin(self, optimizer: Optimizer, counted: Optimizer | None, step: int) -> bool:
        """Note that an optimiser steps, and return whether it moves this model."""
        self._began[optimizer] = step
        return self.of(optimizer, counted) != "another model"

    def end(
        self, optimizer: Optimizer, counted: Optimizer | None, step: int
    ) -> Relation:
        """Note that it has stepped: one whose step held a counted one is a wrapper."""
        inside = self._began.pop(optimizer, step) != step
        return "wrapper" if inside else self.of(optimizer, counted)

    def of(self, optimizer: Optimizer, counted: Optimizer | None) -> Relation:
        if counted is None:
            return "another model"
        if optimizer not in self._known:
            self._known[optimizer] = self._compared(optimizer, counted)
        return self._known[optimizer]

    def follow(self, optimizer: Optimizer, after: Hook) -> None:
        """Call this after each step of this optimiser, which counts from now on."""
        self.close()
        own = set(map(id, self._model.parameters()))
        self._trains = not own.isdisjoint(_held(optimizer))
        self._hooks.callback(optimizer.register_step_post_hook(after).remove)

    def close(self) -> None:
        """Leave the optimiser, and compare others anew."""
        self._known.clear()
        self._hooks.close()

    def _compared(self, optimizer: Optimizer, counted: Optimizer) -> Relation:
        theirs, counted_ids = _held(optimizer), _held(counted)
        own = set(map(id, self._model.parameters()))
        # The model's parameters were replaced, and the counted optimiser has the old.
        stale = self._trains and counted_ids.isdisjoint(own)
        if theirs & counted_ids or (stale and theirs & own):
            return "same parameters"
        return "same model" if theirs & own else "another model"


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


_tracing_listeners: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def on_tracing(handle: Any, number: int) -> None:
    """Have ``handle.traced()`` called when ``notify_tracing(number)`` is traced."""
    _tracing_listeners[number] = handle


def _notify_tracing(number: int) -> bool:
    handle = _tracing_listeners.get(number)
    if handle is not None:
        handle.traced()
    return True


# As torch.compiler.assume_constant_result does, which would import all of dynamo here.
_notify_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
notify_tracing: Callable[[int], bool] = _notify_tracing
