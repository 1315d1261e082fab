"""What passes by on every step: the loss that is differentiated, the norm that clips.

Both are read where torch itself handles them, so a training loop needs no edit. The
patches exist only while somebody listens; nothing here synchronises the device.

Which of the losses that pass by belong to the watched model.

Notices that torch.compile traces a call of ours into somebody's compiled code.

What is traced never runs again as Python: whatever it was to tell, it will not tell.
While tracing, a function marked constant is really called, and nothing of it ends up in
the graph: the one moment at which to say so.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class Listener(Protocol):
    """Somebody who follows a training loop from the outside."""

    def before_backward(self, loss: Tensor, root: Tensor) -> None: ...

    def after_backward(self, loss: Tensor, scale: Tensor | None) -> None: ...

    def before_clipping(self, norm: Tensor) -> None: ...

    def after_scaler_update(self) -> None: ...


# Weak: a handle nobody holds any more must not keep its model alive.
_listening: "list[weakref.ref[Listener]]" = []
_originals: dict[str, Callable[..., Any]] = {}
# What GradScaler returned → the loss it was given, and the factor. Weak: a scaled loss
# dies with its step.
_unscaled: Any = WeakTensorKeyDictionary()


@contextmanager
def tapped(listener: Listener) -> Iterator[None]:
    """Tell the listener of losses and clipping norms for the length of the block."""
    mine = weakref.ref(listener)
    del listener
    if not _listening:
        _patch()
    _listening.append(mine)
    try:
        yield
    finally:
        _listening[:] = [other for other in _listening if other is not mine]
        if not _listening:
            _restore()


def _listeners() -> list[Listener]:
    return [listener for reference in _listening if (listener := reference())]


def _patch() -> None:
    _originals["backward"] = torch.autograd.backward
    # clip_grad_norm_ looks this up when called, however the user imported it.
    _originals["clip"] = clip_grad._clip_grads_with_norm_
    _originals["scale"] = torch.amp.GradScaler.scale
    _originals["update"] = torch.amp.GradScaler.update
    torch.autograd.backward = _backward
    clip_grad._clip_grads_with_norm_ = _clip  # type: ignore[assignment]
    torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign, assignment]
    torch.amp.GradScaler.update = _update  # type: ignore[method-assign, assignment]


def _restore() -> None:
    torch.autograd.backward = _originals.pop("backward")
    clip_grad._clip_grads_with_norm_ = _originals.pop("clip")
    torch.amp.GradScaler.scale = _originals.pop("scale")  # type: ignore[method-assign]
    torch.amp.GradScaler.update = _originals.pop("update")  # type: ignore[method-assign]


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
        listener.before_clipping(total_norm.detach().clone())
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


MARKS = 16
"""Parameters looked at to tell whether a backward pass reached the model."""


class Losses:
    """Collects a step's losses; another model's (a teacher's, a rival's) do not count.

    A backward pass that changed the gradient of no parameter we look at is not ours.
    Where none seems ours (all the marked parameters unused), all count.
    """

    def __init__(self, model: nn.Module) -> None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        stride = max(1, len(trainable) // MARKS)
        self._marked = trainable[::stride]
        self._before: list[object] = []
        self.ever_ours = False
        self.fresh_starts = 0
        """How often gradients were cleared since the step began."""
        self._own: list[Tensor] = []
        self._others: deque[Tensor] = deque(maxlen=MARKS)

    @property
    def ours(self) -> bool:
        """Whether a backward pass of this step reached the model."""
        return bool(self._own)

    def before_backward(self) -> None:
        self._before = self._state()
        if self._own and self._before and not any(self._before):
            self.fresh_starts += 1

    def after_backward(self, loss: Tensor) -> bool:
        """Keep a loss, and return whether it is the model's own."""
        mine = self._state() != self._before
        self.ever_ours = self.ever_ours or mine
        (self._own if mine else self._others).append(loss)
        return mine

    def taken(self) -> Tensor | None:
        """Return the step's objective, the sum over its micro-batches."""
        heard = self._own or list(self._others)
        self._own, self.fresh_starts = [], 0
        self._others.clear()
        if not heard:
            return None
        total = heard[0]
        for loss in heard[1:]:
            total = total + loss.to(total.device)
        return total

    def _state(self) -> list[object]:
        return [_mark(p.grad) for p in self._marked]


def _mark(grad: Tensor | None) -> tuple[int, int] | None:
    # The version counts writes in place; the identity changes when one is first made.
    return None if grad is None else (id(grad), grad._version)


_told: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def listens(handle: Any, number: int) -> None:
    """Have ``handle.traced()`` called when ``tell(number)`` is traced."""
    _told[number] = handle


def _tell(number: int) -> bool:
    handle = _told.get(number)
    if handle is not None:
        handle.traced()
    return True


# As torch.compiler.assume_constant_result does, which would import all of dynamo here.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
tell: Callable[[int], bool] = _tell
