"""Loops of this half, with what real ones carry: logs, clipping, schedules, averages.

Axes, in this file:  B batch · T token.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise_lab.mistakes.case import STEPS, Attach, Kind, control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed_second.models import nano_loss

Loss = Callable[[nn.Module, Any], Tensor]


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices between the ends of a model, and every other weight."""
    ends = ("wte", "tokens", "head", "embed", "place")
    inner, rest = [], []
    for name, weight in model.named_parameters():
        at_end = any(end in name for end in ends)
        (inner if weight.ndim == 2 and not at_end else rest).append(weight)
    return inner, rest


def muon_and_adamw(model: nn.Module, lr: float = 3e-3) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside, AdamW for the rest."""
    inner, rest = split(model)
    one = torch.optim.Muon(inner, lr=0.01, weight_decay=0.01)
    return [torch.optim.AdamW(rest, lr=lr), one]


def warm_cosine(optimizer: torch.optim.Optimizer, warm: int = 5, total: int = 60):
    """Return the schedule that most people write by hand."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = torch.tensor((step - warm) / (total - warm)).clamp(max=1)
        return float(0.1 + 0.45 * (1 + torch.cos(torch.pi * done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Average:
    """An exponential average of a model, evaluated in its place."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, now in zip(self.model.parameters(), model.parameters(), strict=True):
            kept.lerp_(now, 1 - self.decay)


def run(
    model: nn.Module,
    watch: Attach,
    loss: Loss = nano_loss,
    *,
    data: Iterable[Any] | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    lr: float = 3e-3,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip: float = 0.0,
    parts_of: int = 1,
    evaluate: Loss | None = None,
    average: bool = False,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train, and keep a log; each batch is ``parts_of`` micro-batches in a row."""
    optimizers = list(optimizers) or [
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    ]
    schedules = [schedule(one) for one in optimizers] if schedule else []
    kept = Average(model) if average else None
    watch(model, optimizers if len(optimizers) > 1 else optimizers[0])
    log: list[float] = []
    for number, batch in enumerate(parts.batches(STEPS) if data is None else data):
        made = loss(model, batch)
        (made / parts_of).backward()
        log.append(float(made.detach()))
        if (number + 1) % parts_of:
            continue
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in (*optimizers, *schedules):
            one.step()
        for one in optimizers:
            one.zero_grad(set_to_none=True)
        if kept is not None:
            kept.update(model)
        if evaluate and number % 10 == 9:
            validate(kept.model if kept else model, evaluate)
        after(number)
    return log


@torch.no_grad()
def validate(model: nn.Module, loss: Loss) -> float:
    """Return the loss on text that is held back, and leave the mode as it was."""
    was = model.training
    model.eval()
    found = float(loss(model, parts.text(seed=9001)))
    model.train(was)
    return found


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al.)."""

    def __init__(self, weights: Any, lr: float = 5e-4) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_(group["lr"] * m.lerp(p.grad, 0.1).sign())
                    m.lerp_(p.grad, 0.01)


def program(
    name: str,
    source: str,
    make: Callable[[], nn.Module],
    loss: Loss = nano_loss,
    *,
    kind: Kind = "own loop",
    optimizers: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> None:
    """Declare a control that is a model, a loss and options of :func:`run`."""

    def body(watch: Attach) -> None:
        model = make()
        made = optimizers(model) if optimizers else ()
        held = made if isinstance(made, list | tuple) else [made]
        run(model, watch, loss, optimizers=held, **options)

    body.__name__ = name
    control(source=source, kind=kind)(body)


def by_class(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    """Return a maker of optimisers, of all weights that are trained."""

    def make(model: nn.Module) -> Any:
        return kind([p for p in model.parameters() if p.requires_grad], **options)

    return make


def lightning_module(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    configure: Callable[[nn.Module], Any] | None = None,
) -> Any:
    """Return a module of Lightning that trains a model, and validates it alike."""
    from lightning.pytorch import LightningModule

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss(self.model, batch)

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", loss(self.model, batch))

        def configure_optimizers(self) -> Any:
            adamw = by_class(torch.optim.AdamW, lr=3e-3)
            return (configure or adamw)(self)

    return Training()


def rows_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a batch as :class:`Texts` gives it."""
    return nano_loss(model, batch["input_ids"])


def accelerator(**options: Any) -> Any:
    """Return an Accelerator as the first of its process: it remembers earlier ones."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)
