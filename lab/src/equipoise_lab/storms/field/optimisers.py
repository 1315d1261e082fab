"""How a unit trains: optimisers, one or two at once, and the course of the rate."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise_lab.storms.field.architectures import Part

DECAY = 0.01


class Lion(Optimizer):
    """Every weight moves by the rate, along the sign of an average (2302.06675)."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


class SignSGD(Optimizer):
    """Every weight moves by the rate, along the sign of a momentum."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(m.sign(), alpha=-group["lr"])


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices inside blocks: not embeddings, not the output."""
    outside = (nn.Embedding,)
    tables = {
        id(p) for m in model.modules() if isinstance(m, outside) for p in m.parameters()
    }
    named = [(n, p) for n, p in model.named_parameters() if id(p) not in tables]
    return [
        p
        for n, p in named
        if p.ndim == 2 and not re.search("head|score|classifier|shared", n)
    ]


def _adamw(params: Iterable[Tensor], rate: float) -> Optimizer:
    return torch.optim.AdamW(params, rate, weight_decay=DECAY)


def _muon(model: nn.Module, rate: float) -> list[Optimizer]:
    matrices = _matrices(model)
    theirs = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in theirs]
    return [torch.optim.Muon(matrices, lr=10 * rate), _adamw(rest, rate)]


ADAMS = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A choice of optimisers and the rate at which they train well here."""

    name: str
    part: Part
    rate: float
    make: Callable[[nn.Module, float], list[Optimizer]]
    settings: tuple[str, ...] = ()
    """Settings that some faults need."""


def _single(name: str, part: Part, rate: float, kind: Any, **options: Any) -> Recipe:
    def make(model: nn.Module, rate: float) -> list[Optimizer]:
        return [kind(list(model.parameters()), lr=rate, **options)]

    settings = ("betas",) if issubclass(kind, ADAMS) else ()
    return Recipe(name=name, part=part, rate=rate, make=make, settings=settings)


_ALL = (
    _single("adamw", "open", 2e-3, torch.optim.AdamW, weight_decay=DECAY),
    _single("sgd", "open", 0.05, torch.optim.SGD, momentum=0.9),
    _single("lion", "open", 2e-4, Lion, weight_decay=DECAY),
    _single("adafactor", "open", 2e-2, torch.optim.Adafactor),
    Recipe(name="muon+adamw", part="open", rate=2e-3, make=_muon),
    _single("rmsprop", "open", 5e-4, torch.optim.RMSprop),
    _single("adam .95", "open", 1e-3, torch.optim.Adam, betas=(0.9, 0.95)),
    _single("nadam", "locked", 1e-3, torch.optim.NAdam),
    _single("radam", "locked", 1e-3, torch.optim.RAdam),
    _single("adamax", "locked", 2e-3, torch.optim.Adamax),
    _single("adagrad", "locked", 1e-2, torch.optim.Adagrad),
    _single("signsgd", "locked", 1e-4, SignSGD, weight_decay=DECAY),
    _single("amsgrad", "locked", 1e-3, torch.optim.AdamW, amsgrad=True),
    _single("nesterov", "locked", 0.05, torch.optim.SGD, momentum=0.9, nesterov=True),
    _single("adamw .99", "locked", 1e-3, torch.optim.AdamW, betas=(0.95, 0.99)),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


def names(part: Part) -> list[str]:
    return [recipe.name for recipe in _ALL if recipe.part == part]


def share(schedule: str, warmup: float, at: float) -> float:
    """Return the rate over its peak at a share of the run.

    >>> share("constant", 0.5, 0.25), share("linear", 0.0, 0.5), share("wsd", 0.0, 1.0)
    (0.5, 0.5, 0.0)
    """
    if at < warmup:
        return at / warmup
    rest = (at - warmup) / (1 - warmup)
    return SCHEDULES[schedule][1](min(1.0, rest))


def _steps(x: float) -> float:
    return 0.5 ** int(3 * x)


def _cosine(x: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * x))


SCHEDULES: dict[str, tuple[Part, Callable[[float], float]]] = {
    "constant": ("open", lambda x: 1.0),
    "cosine": ("open", lambda x: 0.1 + 0.9 * _cosine(x)),
    "linear": ("open", lambda x: 1 - x),
    "wsd": ("open", lambda x: min(1.0, 4 * (1 - x))),
    "restarts": ("open", lambda x: 0.05 + 0.95 * _cosine(3 * x % 1)),
    "inverse root": ("open", lambda x: (1 + 20 * x) ** -0.5),
    "stairs": ("locked", _steps),
    "triangle": ("locked", lambda x: 0.2 + 0.8 * (1 - abs(2 * x - 1))),
    "exponential": ("locked", lambda x: 0.02**x),
    "polynomial": ("locked", lambda x: (1 - x) ** 2),
    "second warm-up": (
        "locked",
        lambda x: 1.0 if x < 0.5 else min(1.0, 0.3 + 2.8 * (x - 0.5)),
    ),
    "long tail": ("locked", lambda x: max(0.1, 1 - 1.5 * x)),
}
"""Name → part, and the rate after the warm-up by the share of what is left."""


def schedules(part: Part) -> list[str]:
    return [name for name, (its, _) in SCHEDULES.items() if its == part]
