"""Hooks into the training loop: losses, clipping norms, gradient scalers, tracing.

Losses and norms are read where torch itself handles them, so a loop needs no edit. The
patches exist only while a model is watched; nothing here synchronises the device. What
torch.compile traces never runs again as Python: a function marked constant is really
called while tracing, and leaves nothing in the graph, so it can report the tracing.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.utils
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from equipoise.probes.loop_events import (
    AnyBackward,
    AnyUpdate,
    GradientsClipped,
    LoopEvent,
    LossScaled,
    ScheduleMoves,
)


class LoopListener(Protocol):
    """Something that follows a training loop from the outside."""

    def before_backward(self, loss: Tensor | None, roots: Sequence[Tensor]) -> None: ...

    def after_backward(self, loss: Tensor | None, scale: Tensor | None) -> None: ...

    def before_clipping(self, part: Tensor, parameters: object) -> None: ...

    def after_scaler_update(self, asked: Collection[int]) -> None: ...

    def before_update(self, optimizer: Optimizer, *, closure: bool) -> None: ...

    def after_update(self, optimizer: Optimizer) -> None: ...

    def on_loop(self, event: LoopEvent) -> None: ...


# Weak: a handle that was dropped must not keep its model alive.
_active_listeners: "list[weakref.ref[LoopListener]]" = []
_originals: dict[str, Callable[..., Any]] = {}
_patched: set[str] = set()
_hooks: dict[str, RemovableHandle] = {}
_inside: list[Optimizer] = []
"""Optimisers whose hooks torch is running now."""
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
    for name, (home, attribute, ours) in _PATCHES.items():
        if name not in _patched:
            _originals[name] = getattr(home, attribute)
            setattr(home, attribute, ours)
            _patched.add(name)
    if "before" not in _hooks:
        _hooks["before"] = register_optimizer_step_pre_hook(_before_update)
    if "after" not in _hooks:
        _hooks["after"] = register_optimizer_step_post_hook(_after_update)


def _restore() -> None:
    """Undo it, but where another library has patched over ours, which then stays.

    The originals stay known: a module imported meanwhile may call ours for good.
    """
    for name in [name for name, hook in _hooks.items() if _removable(hook)]:
        _hooks.pop(name).remove()
    for name, (home, attribute, ours) in _PATCHES.items():
        if getattr(home, attribute) is ours:
            setattr(home, attribute, _originals[name])
            _patched.discard(name)


def _removable(hook: RemovableHandle) -> bool:
    """Return whether torch is not just going through the hooks, or this is the last.

    One that must stay finds no listener, and is used again by the next watch.
    """
    others = hook.hooks_dict_ref()
    return not _inside or not others or next(reversed(others)) == hook.id


def _tell(event: LoopEvent) -> None:
    """Have every listener count an event."""
    for listener in _listeners():
        listener.on_loop(event)


def _before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before the step of any optimiser."""
    if torch.compiler.is_compiling():
        return
    # The first argument is the optimiser; a closure runs the pass inside the step.
    closure = any(map(callable, (*args[1:], *kwargs.values())))
    _tell(AnyUpdate(optimizer))
    with _running_hooks_of(optimizer):
        for listener in _listeners():
            listener.before_update(optimizer, closure=closure)


def _after_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch after the step of any optimiser."""
    if torch.compiler.is_compiling():
        return
    with _running_hooks_of(optimizer):
        for listener in _listeners():
            listener.after_update(optimizer)


@contextmanager
def _running_hooks_of(optimizer: Optimizer) -> Iterator[None]:
    _inside.append(optimizer)
    try:
        yield
    finally:
        _inside.remove(optimizer)


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    # Reentrant checkpointing calls it again inside a pass, which is part of that one.
    if torch.compiler.is_compiling() or inside_backward():
        return _originals["backward"](tensors, *args, **kwargs)
    if isinstance(tensors, Iterator):
        tensors = tuple(tensors)
    roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
    loss, scale = _objective(roots, args[0] if args else kwargs.get("grad_tensors"))
    roots = [root for root in roots if isinstance(root, Tensor)]
    _tell(AnyBackward())
    for listener in _listeners():
        listener.before_backward(loss, roots)
    done = _originals["backward"](tensors, *args, **kwargs)
    for listener in _listeners():
        listener.after_backward(loss, scale)
    return done


def inside_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _objective(roots: Any, given: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scalar Σ gᵢ·lossᵢ that a pass differentiates, and a scaler's factor.

    gᵢ is 1 where no gradient is given. None if a root is no scalar: it is no loss.
    """
    weights = given if isinstance(given, list | tuple) else [given] * len(roots)
    total = scale = None
    scalars = all(map(_is_scalar, roots)) and len(weights) == len(roots)
    for root, weight in zip(roots, weights, strict=False):
        if not isinstance(root, Tensor):
            continue
        loss, scale = _unscaled.get(root, (root, scale))
        # A copy: the loop may divide or accumulate into its loss in place afterwards.
        if scalars:
            loss = loss.detach().clone()
            total = added(total, loss if weight is None else loss * weight.detach())
    return total, scale


def _is_scalar(root: object) -> bool:
    return isinstance(root, Tensor) and root.numel() == 1 and not root.is_complex()


_CLIPS_BY_ITS_OWN_NORM = inspect.unwrap(clip_grad.clip_grad_norm_).__code__


def _clip(
    parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any, **named: Any
) -> Any:
    if not torch.compiler.is_compiling():
        given = sys._getframe(1).f_code is not _CLIPS_BY_ITS_OWN_NORM
        if isinstance(parameters, Iterator):  # looking would use it up
            parameters = list(parameters)
        some = [parameters] if isinstance(parameters, Tensor) else parameters
        seen = some if isinstance(some, list | tuple) else None
        norm = total_norm.detach()
        _tell(GradientsClipped(seen, float(max_norm), norm, given))
        for listener in _listeners():
            listener.before_clipping(norm.clone(), parameters)
    return _originals["clip"](parameters, max_norm, total_norm, *rest, **named)


_moving: list[Any] = []
"""Schedules whose steps are under way: one that holds others moves them."""


def _moves(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a class of schedules that tells of itself first."""

    @functools.wraps(original)
    def step(schedule: Any, *args: Any, **named: Any) -> Any:
        if not _moving and not torch.compiler.is_compiling():
            initial = getattr(schedule, "_step_count", 1) == 0
            _tell(ScheduleMoves(schedule, initial))
        _moving.append(schedule)
        try:
            return _originals[name](schedule, *args, **named)
        finally:
            _moving.pop()

    return step


def _scale(scaler: Any, outputs: Any) -> Any:
    scaled = _originals["scale"](scaler, outputs)
    _tell(LossScaled(scaler))
    several = isinstance(scaled, list | tuple) and isinstance(outputs, list | tuple)
    pairs = zip(scaled, outputs, strict=True) if several else [(scaled, outputs)]
    for after, before in pairs:
        if isinstance(after, Tensor) and after is not before:
            _unscaled[after] = (before.detach(), scaler._scale)
    return scaled


def _update(scaler: Any, *args: Any, **kwargs: Any) -> None:
    # Ids of the optimisers it was told to step; its own update forgets them.
    asked = {
        number
        for number, state in getattr(scaler, "_per_optimizer_states", {}).items()
        if state["stage"] is OptState.STEPPED
    }
    _originals["update"](scaler, *args, **kwargs)
    for listener in _listeners():
        listener.after_scaler_update(asked)


def joined_norm(norms: list[Tensor]) -> Tensor:
    """Return the norm of all; of DTensors, which the ranks hold in parts, the last."""
    if any(type(norm) is not Tensor for norm in norms):
        return norms[-1]
    wide = torch.promote_types(norms[-1].dtype, torch.float32)
    together = torch.stack([norm.to(norms[-1].device, wide) for norm in norms])
    joined: Tensor = torch.linalg.vector_norm(together)
    return joined


def added(total: Tensor | None, loss: Tensor) -> Tensor:
    return loss if total is None else total + loss.to(total.device)


_PATCHES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "backward": (torch.autograd, "backward", _backward),
    # clip_grad_norm_ looks this up when called, however the user imported it.
    "clip": (clip_grad, "_clip_grads_with_norm_", _clip),
    "clip with a norm": (torch.nn.utils, "clip_grads_with_norm_", _clip),
    "scale": (torch.amp.GradScaler, "scale", _scale),
    "update": (torch.amp.GradScaler, "update", _update),
    **{
        f"schedule {name}": (
            kind,
            "step",
            _moves(f"schedule {name}", vars(kind)["step"]),
        )
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and "step" in vars(kind) and kind is not Optimizer
    },
}
"""Name → where torch has a function, what it is called there, and ours."""


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
