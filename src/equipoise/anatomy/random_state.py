"""The state of every random generator a forward pass may draw from, to put it back."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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
