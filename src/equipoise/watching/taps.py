"""What passes by on every step: the loss that is differentiated, the norm that clips.

Both are read where torch itself handles them, so a training loop needs no edit. The
patches exist only while somebody listens; nothing here synchronises the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor


@dataclass(slots=True)
class StepTap:
    """Collects, between two steps, every loss root and the last clipping norm."""

    losses: list[Tensor] = field(default_factory=list)
    clip_norm: Tensor | None = None

    def taken(self) -> tuple[list[Tensor], Tensor | None]:
        """Return what was heard since the last call, and forget it."""
        heard = self.losses, self.clip_norm
        self.losses, self.clip_norm = [], None
        return heard


_listening: list[StepTap] = []
# GradScaler's output → the loss it scaled. Weak: a scaled loss dies with its step.
_unscaled: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()
_originals: dict[str, Callable[..., Any]] = {}


@contextmanager
def tapped() -> Iterator[StepTap]:
    """Listen to losses and clipping norms for the length of the block."""
    tap = StepTap()
    if not _listening:
        _patch()
    _listening.append(tap)
    try:
        yield tap
    finally:
        _listening[:] = [other for other in _listening if other is not tap]
        if not _listening:
            _restore()


def _patch() -> None:
    _originals["backward"] = torch.autograd.backward
    # clip_grad_norm_ looks this up when called, however the user imported it.
    _originals["clip"] = clip_grad._clip_grads_with_norm_
    _originals["scale"] = torch.amp.GradScaler.scale
    torch.autograd.backward = _backward
    clip_grad._clip_grads_with_norm_ = _clip  # type: ignore[assignment]
    torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign, assignment]


def _restore() -> None:
    torch.autograd.backward = _originals.pop("backward")
    clip_grad._clip_grads_with_norm_ = _originals.pop("clip")
    torch.amp.GradScaler.scale = _originals.pop("scale")  # type: ignore[method-assign]


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    root = tensors if isinstance(tensors, Tensor) else None
    if root is not None and root.numel() == 1:
        # A copy: the loop may divide or accumulate into its loss in place afterwards.
        loss = _unscaled.get(id(root), root).detach().clone()
        for tap in _listening:
            tap.losses.append(loss)
    return _originals["backward"](tensors, *args, **kwargs)


def _clip(parameters: Any, max_norm: float, total_norm: Tensor, *rest: Any) -> Any:
    for tap in _listening:
        tap.clip_norm = total_norm.detach().clone()
    return _originals["clip"](parameters, max_norm, total_norm, *rest)


def _scale(scaler: Any, outputs: Any) -> Any:
    scaled = _originals["scale"](scaler, outputs)
    if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
        _unscaled[id(scaled)] = outputs
    return scaled
