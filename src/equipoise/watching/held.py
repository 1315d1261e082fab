"""One micro-batch, held by reference, and how to run it again."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from equipoise.anatomy.names import unwrapped
from equipoise.probes.window import Door
from equipoise.watching.isolation import Circumstances, called_on_copies, isolated

# What only wraps a call. FSDP's wrapper is not here: it gathers the weights.
TRANSPARENT = {"OptimizedModule", "DistributedDataParallel", "DataParallel"}


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of the model, and its circumstances."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    circumstances: Circumstances

    def replay(self, model: nn.Module) -> Any:
        """Return what the model says to it now, eagerly, without gradients.

        Compiled code stays compiled: the stance only makes this one call run the
        Python that was compiled.
        """
        inner = _called(model)
        with (
            isolated(inner, self.circumstances),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            # A compiled block's wrapper warns of the global hooks we listen with.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            return called_on_copies(inner, self.args, self.kwargs)


def _called(model: nn.Module) -> nn.Module:
    while type(model).__name__ in TRANSPARENT:
        inner = getattr(model, "_orig_mod", None)
        model = cast(nn.Module, model.module if inner is None else inner)
    return model


class Holder:
    """Holds the first micro-batch that counts, without touching compiled code."""

    def __init__(self, model: nn.Module, *, only_training: bool) -> None:
        self._model, self._only_training = model, only_training
        self.batch: Batch | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to calls of the model for the length of the block."""
        if self._model._compiled_call_impl is not None:
            with _swapped(self._model, self._note):
                yield
            return
        # On torch.compile's wrapper a hook runs outside the compiled frame.
        door = Door(self._hook)
        handle = self._model.register_forward_pre_hook(door, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(args, kwargs)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.batch is not None:
            return
        if torch.is_grad_enabled() or not self._only_training:
            now = Circumstances.now(unwrapped(self._model))
            self.batch = Batch(args, dict(kwargs), now)


@contextmanager
def _swapped(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """After ``model.compile()`` a hook would be traced: stand before the call."""
    compiled = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        assert compiled is not None
        return compiled(*args, **kwargs)

    model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile has taken over.

    Example:
        >>> compiled_parts(nn.Linear(2, 2)), compiled_parts(torch.compile(nn.ReLU()))
        ([], [''])
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
    ]
