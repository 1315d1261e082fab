"""A copy of the user's model as a pure function of its parameters.

Its modules are shallow copies, so what a forward pass writes to them stays with them;
its buffers are copies; it is always in evaluation mode, in which a model is a function.
Wrappers (DDP, torch.compile, FSDP2's hooks and classes) are left behind, and the fused
attention kernels, which cannot be differentiated twice, make way for the plain one.
"""

import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.anatomy.sites import unwrapped

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ModelCopy:
    """A model as a pure function of its parameters."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self.body = shallow(unwrapped(model), {})
        wide = torch.float32
        self.parameters = {
            name: _at_least(_gathered(p), dtype or wide)
            for name, p in self.body.named_parameters()
        }
        self.trainable = [n for n, p in self.body.named_parameters() if p.requires_grad]
        self._buffers = {
            name: _at_least(b.detach().clone(), dtype or wide)
            for name, b in self.body.named_buffers()
        }

    def __call__(
        self, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the model's output with some of its parameters replaced."""
        buffers = {name: b.clone() for name, b in self._buffers.items()}
        with _plain_kernels():
            return functional_call(
                self.body, {**self.parameters, **values, **buffers}, args, kwargs
            )


class _NoCheckpoint:
    """In place of reentrant checkpointing: runs the function and keeps everything."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace the other kind, which acts before and after the function."""
    yield


CHECKPOINTING = {
    "CheckpointFunction": _NoCheckpoint,
    "_checkpoint_without_reentrant_generator": _no_checkpoint,
}
"""No gradient of a gradient survives activation checkpointing of either kind."""


@contextmanager
def _without_checkpointing() -> Iterator[None]:
    originals = {name: getattr(checkpointing, name) for name in CHECKPOINTING}
    try:
        for name, plain in CHECKPOINTING.items():
            setattr(checkpointing, name, plain)
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpointing, name, original)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention in plain operations; no autocast, compiled code or checkpointing."""
    with (
        _without_checkpointing(),
        sdpa_kernel(SDPBackend.MATH),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        # Without a GPU torch warns that there is nothing to switch off.
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
        yield


def shallow(module: nn.Module, seen: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of the tree of modules that holds the very same parameters."""
    if id(module) in seen:
        return seen[id(module)]
    forward = module.__dict__.get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not module:
        return module  # a wrapper refers to this very object
    copy: nn.Module = object.__new__(_plain_class(type(module)))
    seen[id(module)] = copy
    copy.__dict__ = dict(module.__dict__)
    if forward is not None:
        copy.__dict__["forward"] = types.MethodType(forward.__func__, copy)
    copy.__dict__.update(
        training=False,
        _compiled_call_impl=None,
        _parameters=dict(module._parameters),
        _buffers=dict(module._buffers),
        _modules={
            name: child and shallow(unwrapped(child), seen)
            for name, child in module._modules.items()
        },
        **{name: _user_hooks(module.__dict__[name]) for name in HOOKS},
    )
    return copy


def _plain_class(kind: type) -> type:
    """Return the user's class under FSDP2's, which is made of the two."""
    names = [base.__name__ for base in kind.__bases__]
    return kind.__bases__[1] if names[:1] == ["FSDPModule"] else kind


def _user_hooks(hooks: Mapping[int, Any]) -> "OrderedDict[int, Any]":
    """Return the user's own hooks; FSDP's would gather, and ours would measure."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if not _foreign(hook))


def _foreign(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    place = type(owner).__module__
    return place.startswith(("equipoise.", "torch.distributed."))


def _gathered(parameter: Tensor) -> Tensor:
    """Return all of a parameter; under FSDP2 that asks the other ranks."""
    gather = getattr(parameter.detach(), "full_tensor", None)
    full: Tensor = gather() if gather else parameter.detach()
    return full


def _at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point() or x.dtype == dtype:
        return x
    wider = torch.promote_types(x.dtype, dtype)
    return x.to(wider)
