"""Run a forward pass again, in the circumstances it had, and leave no trace of it.

Restored afterwards: random state (torch on every device in use, ``random``, NumPy) and
autocast; buffers (BatchNorm's statistics, spectral norm's vectors) are never touched.
Python attributes that a module changes in its forward are not ours to find.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
