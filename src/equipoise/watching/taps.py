"""What passes by on every step: the loss that is differentiated, the norm that clips.

Both are read where torch itself handles them, so a training loop needs no edit. The
patches exist only while somebody listens; nothing here synchronises the device.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor
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
