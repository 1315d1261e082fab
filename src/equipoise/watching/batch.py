"""One micro-batch, stored by reference, and how to run it again without a trace.

Restored after a repeated forward pass: random state (torch on every device in use,
``random``, NumPy) and autocast; buffers (BatchNorm's statistics, spectral norm's
vectors) are never touched. Python attributes that a module changes in its forward are
not restored.
"""

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.anatomy.sites import unwrapped
from equipoise.probes.window import CallWrapper, is_compiled

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class RandomState:
    """Every generator a forward pass may draw from."""

    host: Tensor
    cuda: dict[int, Tensor]
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls, model: nn.Module) -> "RandomState":
        devices = {
            p.device.index for p in model.parameters() if p.device.type == "cuda"
        }
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            {i: torch.cuda.get_rng_state(i) for i in devices},
            random.getstate(),
            numpy.random.get_state() if numpy else None,
        )

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class Autocast:
    """Which devices cast, and to what."""

    dtypes: dict[str, torch.dtype]

    @classmethod
    def now(cls) -> "Autocast":
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        return cls({device: torch.get_autocast_dtype(device) for device in on})

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in DEVICES:
                wanted = device in self.dtypes
                if wanted or torch.is_autocast_enabled(device):
                    # No cache: a copy cast without gradients must not be found there
                    # by the model's next pass.
                    cast = torch.autocast(
                        device,
                        self.dtypes.get(device),
                        enabled=wanted,
                        cache_enabled=False,
                    )
                    stack.enter_context(cast)
            yield


@dataclass(frozen=True, slots=True)
class CallState:
    """What a call depends on besides its arguments and the weights."""

    random_state: RandomState
    autocast: Autocast

    @classmethod
    def now(cls, model: nn.Module) -> "CallState":
        return cls(RandomState.now(model), Autocast.now())


@contextmanager
def isolated(model: nn.Module, call_state: CallState) -> Iterator[None]:
    """Restore that state for the block; undo everything afterwards."""
    before = RandomState.now(model)
    call_state.random_state.restore()
    try:
        with torch.no_grad(), call_state.autocast.entered():
            yield
    finally:
        before.restore()


def called_on_copies(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a model's output while its buffers are copies.

    Restoring them in place would not do: a backward pass that has yet to come would
    find that what it saved was written to.
    """
    copies = {name: b.detach().clone() for name, b in model.named_buffers()}
    return functional_call(model, copies, args, kwargs)


# What only wraps a call. FSDP's wrapper is not here: it gathers the weights.
TRANSPARENT = {"OptimizedModule", "DistributedDataParallel", "DataParallel"}


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of the model, and the state it ran in."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call_state: CallState

    def replay(self, model: nn.Module) -> Any:
        """Return the model's output for it now, eagerly, without gradients.

        Compiled code stays compiled: the stance only makes this one call run the
        Python that was compiled.
        """
        inner = _called(model)
        with (
            isolated(inner, self.call_state),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            # A compiled block's wrapper warns of the global hooks we read with.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            return called_on_copies(inner, self.args, self.kwargs)


def _called(model: nn.Module) -> nn.Module:
    while type(model).__name__ in TRANSPARENT:
        inner = getattr(model, "_orig_mod", None)
        model = cast(nn.Module, model.module if inner is None else inner)
    return model


class BatchCapture:
    """Stores the first micro-batch that counts, without touching compiled code."""

    def __init__(self, model: nn.Module, *, only_training: bool) -> None:
        self._model, self._only_training = model, only_training
        self.batch: Batch | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Store a call of the model during the block."""
        wrapper = CallWrapper(self._model, self._store, lambda module: None)
        try:
            yield
        finally:
            wrapper.remove()

    def _store(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or self.batch is not None:
            return
        if torch.is_grad_enabled() or not self._only_training:
            now = CallState.now(unwrapped(self._model))
            self.batch = Batch(args, dict(kwargs), now)


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile has compiled.

    Example:
        >>> compiled_parts(nn.Linear(2, 2)), compiled_parts(torch.compile(nn.ReLU()))
        ([], [''])
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "OptimizedModule" or is_compiled(module)
    ]
