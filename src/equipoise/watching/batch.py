"""One micro-batch, held by reference, and how to run it again.

Run a forward pass again, in the circumstances it had, and leave no trace of it.

Restored afterwards: random state (torch on every device in use, ``random``, NumPy) and
autocast; buffers (BatchNorm's statistics, spectral norm's vectors) are never touched.
Python attributes that a module changes in its forward are not ours to find.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.anatomy.sites import unwrapped
from equipoise.probes.window import Door

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Randomness:
    """Every generator a forward pass may draw from."""

    host: Tensor
    cuda: dict[int, Tensor]
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls, model: nn.Module) -> "Randomness":
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
                    # by the patient's next pass.
                    cast = torch.autocast(
                        device,
                        self.dtypes.get(device),
                        enabled=wanted,
                        cache_enabled=False,
                    )
                    stack.enter_context(cast)
            yield


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a call depends on besides its arguments and the weights."""

    randomness: Randomness
    autocast: Autocast

    @classmethod
    def now(cls, model: nn.Module) -> "Circumstances":
        return cls(Randomness.now(model), Autocast.now())


@contextmanager
def isolated(model: nn.Module, circumstances: Circumstances) -> Iterator[None]:
    """Be back in those circumstances for the block; undo everything afterwards."""
    before = Randomness.now(model)
    circumstances.randomness.restore()
    try:
        with torch.no_grad(), circumstances.autocast.entered():
            yield
    finally:
        before.restore()


def called_on_copies(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a model says while its buffers are copies.

    Restoring them in place would not do: a backward pass that has yet to come would
    find that what it saved was written to.
    """
    copies = {name: b.detach().clone() for name, b in model.named_buffers()}
    return functional_call(model, copies, args, kwargs)


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
