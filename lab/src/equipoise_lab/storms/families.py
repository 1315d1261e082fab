"""Fault families and healthy controls: what each changes in model, data and steps.

A change is a value: options to replace, a wrapper around the batches, a function of the
model before training and one of the trainer before every step. Effects are organic: a
fault is a setting people really choose, or an accident that really happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from equipoise_lab.data import Batch, Batches
from equipoise_lab.models import GPTConfig
from equipoise_lab.storms.plan import Storm
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer

SMALL = GPTConfig(width=48, depth=4, heads=4, context=32)
DEEP = replace(SMALL, depth=12)
TRAIN = TrainOptions(lr=2e-3, warmup=20, batch=8, every=5)


@dataclass(frozen=True, kw_only=True)
class FaultChange:
    """What a family does to an ordinary run."""

    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[Batches], Batches] = lambda batches: batches
    prepare: Callable[[nn.Module], None] = lambda model: None
    before_step: Callable[[Trainer], None] = lambda trainer: None
    injected: int = 0
    """The step at which the cause begins; 0 from the start."""
    layer: int | None = None
    """The block at fault, where it is one."""
    pretrained: int = 0
    """Unwatched steps before the run: it continues a trained model."""


def between(low: float, high: float, share: float) -> float:
    """Return the point at ``share`` of the way, in logarithms.

    >>> round(between(1e-3, 1e-1, 0.5), 6)
    0.01
    """
    return float(low * (high / low) ** share)


def shape_of(storm: Storm) -> GPTConfig:
    """Return the model of a run before its change."""
    base = DEEP if storm.tier == "deep" else SMALL
    if storm.family == "router":
        return replace(base, experts=4, ffn_width=96)
    if storm.family == "post-LN":
        return replace(base, depth=max(6, base.depth))
    return base


def change_of(storm: Storm) -> FaultChange:
    """Return what the run's family changes, at the run's severity."""
    if storm.role == "reference":
        return FaultChange()
    kinds = FAULTS if storm.role == "fault" else CONTROLS
    return kinds[storm.family](storm)


def _learning_rate(storm: Storm) -> FaultChange:
    return FaultChange(train={"lr": between(3e-3, 1e-1, storm.severity)})


def _ramp(storm: Storm) -> FaultChange:
    start = storm.steps // 3
    times = between(1.5, 60.0, storm.severity)

    def grow(trainer: Trainer) -> None:
        done = max(0, trainer.step - start) / max(1, storm.steps - start)
        for group in trainer.optimizer.param_groups:
            group["lr"] *= times**done

    return FaultChange(before_step=grow, injected=start, train={"floor": 1.0})


def _no_warm_up(storm: Storm) -> FaultChange:
    rate = between(1e-3, 6e-2, storm.severity)
    return FaultChange(train={"warmup": 0, "lr": rate, "betas": (0.9, 0.999)})


def _post_ln(storm: Storm) -> FaultChange:
    rate = between(1e-3, 2e-2, storm.severity)
    return FaultChange(model={"residual": "post"}, train={"lr": rate, "warmup": 0})


def _scale(names: tuple[str, ...], times: float) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def scale(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and any(part in name for part in names):
                parameter.mul_(times)

    return scale


def _logit_growth(storm: Storm) -> FaultChange:
    times = between(1.2, 12.0, storm.severity)
    return FaultChange(
        prepare=_scale(("q_proj", "k_proj"), times),
        train={"weight_decay": 0.0, "lr": 5e-3},
    )


def _precision(storm: Storm) -> FaultChange:
    """From a third on, weights have few bits and no copy: small updates are lost."""
    bits, start = round(11 - 8 * storm.severity), storm.steps // 3

    @torch.no_grad()
    def store(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters() if trainer.step >= start else ():
            parameter.copy_(to_bits(parameter, bits))

    return FaultChange(before_step=store, injected=start)


def to_bits(x: Tensor, bits: int) -> Tensor:
    """Return numbers with so many bits of significand, nearest.

    >>> to_bits(torch.tensor([1.0, 1.3, -0.3]), 2).tolist()
    [1.0, 1.5, -0.25]
    """
    significand, exponent = torch.frexp(x)
    scale = 2.0**bits
    return torch.ldexp((significand * scale).round() / scale, exponent)


@dataclass
class PerturbedBatches:
    """Batches with a change at some steps; it counts what it gave out."""

    batches: Batches
    alter: Callable[[int, Batch], Batch]
    given: int = 0

    def take(self) -> Batch:
        batch = self.alter(self.given, self.batches.take())
        self.given += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"given": self.given, "batches": self.batches.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.batches.restore(state["batches"])


def _random_targets(batch: Batch, seed: int) -> Batch:
    x, y = batch
    rng = torch.Generator().manual_seed(seed)
    return x, torch.randint(0, 256, y.shape, generator=rng)


def _corrupted(storm: Storm) -> FaultChange:
    """A burst of wrong labels; the longest ones last until the end."""
    start = storm.steps // 2
    length = round(between(2, storm.steps - start, storm.severity))

    def alter(step: int, batch: Batch) -> Batch:
        wrong = start <= step < start + length
        return _random_targets(batch, step) if wrong else batch

    return FaultChange(
        batches=lambda batches: PerturbedBatches(batches, alter),
        injected=start,
    )


def _adam(storm: Storm) -> FaultChange:
    """β₂ too small for odd seeds; ε too large from a third on for even ones."""
    if storm.seed % 2:
        return FaultChange(
            train={"betas": (0.9, 0.95 - 0.45 * storm.severity), "lr": 6e-3}
        )
    epsilon, start = between(1e-6, 30.0, storm.severity), storm.steps // 3

    def widen(trainer: Trainer) -> None:
        for group in trainer.optimizer.param_groups:
            group["eps"] = epsilon if trainer.step >= start else group["eps"]

    return FaultChange(before_step=widen, injected=start)


def _router(storm: Storm) -> FaultChange:
    """A load-balance loss with the wrong sign: tokens crowd into few experts.

    Beyond 20 it drowns the loss in the clipped gradient from the first step on.
    """
    weight = min(between(1.4e-5, 1e4, storm.severity), 20.0)
    return FaultChange(train={"balance_weight": 0.01 - weight})


def _residual(storm: Storm) -> FaultChange:
    """One block writes more with every step from a quarter on: decay's wrong sign."""
    growth, start = between(2e-3, 0.15, storm.severity), storm.steps // 4
    layer = storm.seed % shape_of(storm).depth
    writers = ("attention.o_proj", "feedforward.down_proj")
    grow = _scale(tuple(f"blocks.{layer}.{name}" for name in writers), 1 + growth)

    def blow_up(trainer: Trainer) -> None:
        if trainer.step >= start:
            grow(trainer.model)

    return FaultChange(before_step=blow_up, injected=start, layer=layer)


def _init(storm: Storm) -> FaultChange:
    """Embeddings too large for odd seeds; all matrices, or one block's, for others."""
    if storm.seed % 4 == 0:
        layer = storm.seed // 4 % shape_of(storm).depth
        times = 1 + between(0.02, 20.0, storm.severity)
        return FaultChange(prepare=_scale((f"blocks.{layer}.",), times), layer=layer)
    if storm.seed % 2:
        return FaultChange(model={"embedding_std": between(0.15, 12.0, storm.severity)})
    return FaultChange(model={"init_std": between(0.03, 0.8, storm.severity)})


FAULTS: dict[str, Callable[[Storm], FaultChange]] = {
    "learning rate": _learning_rate,
    "ramp": _ramp,
    "no warm-up": _no_warm_up,
    "post-LN": _post_ln,
    "logit growth": _logit_growth,
    "precision": _precision,
    "corrupted data": _corrupted,
    "adam": _adam,
    "router": _router,
    "residual": _residual,
    "init": _init,
}


def _spiky(storm: Storm) -> FaultChange:
    """One batch in forty is a page of one character: easy to see, harmless."""

    def alter(step: int, batch: Batch) -> Batch:
        if step % 40 != 39:
            return batch
        return _random_targets(batch, step)

    return FaultChange(batches=lambda batches: PerturbedBatches(batches, alter))


def _rate_step(storm: Storm) -> FaultChange:
    def step(trainer: Trainer) -> None:
        if trainer.step >= storm.steps // 2:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 2

    return FaultChange(before_step=step, train={"lr": 1e-3, "floor": 1.0})


def _shorter(times: int) -> Callable[[int, Batch], Batch]:
    def alter(step: int, batch: Batch) -> Batch:
        x, y = batch
        length = x.shape[1] // times if step < 100 else x.shape[1]
        return x[:, :length], y[:, :length]

    return alter


def _length(storm: Storm) -> FaultChange:
    return FaultChange(batches=lambda batches: PerturbedBatches(batches, _shorter(2)))


def _restart(storm: Storm) -> FaultChange:
    """The optimiser forgets its moments half-way, as after a lost checkpoint."""

    def forget(trainer: Trainer) -> None:
        if trainer.step == storm.steps // 2:
            trainer.optimizer.state.clear()

    return FaultChange(before_step=forget)


def _curriculum(storm: Storm) -> FaultChange:
    """The first fifth repeats few windows; then the whole text follows."""
    first: list[Batch] = []

    def alter(step: int, batch: Batch) -> Batch:
        if len(first) < 8:
            first.append(batch)
        return first[step % 8] if step < storm.steps // 5 else batch

    return FaultChange(batches=lambda batches: PerturbedBatches(batches, alter))


def _averaging(storm: Storm) -> FaultChange:
    """Every hundred steps the weights become the mean of the last two snapshots."""
    last: list[list[Tensor]] = []

    @torch.no_grad()
    def average(trainer: Trainer) -> None:
        if trainer.step % 50 or not trainer.step:
            return
        now = [p.detach().clone() for p in trainer.model.parameters()]
        if last and trainer.step % 100 == 0:
            for p, a, b in zip(trainer.model.parameters(), now, last[-1], strict=True):
                p.copy_((a + b) / 2)
        last[:] = [now]

    return FaultChange(before_step=average)


def _only(names: tuple[str, ...]) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    return freeze


CONTROLS: dict[str, Callable[[Storm], FaultChange]] = {
    "spiky data": _spiky,
    "learning-rate step": _rate_step,
    "length change": _length,
    "restart": _restart,
    "curriculum": _curriculum,
    "weight averaging": _averaging,
    "small batch": lambda storm: FaultChange(train={"batch": 1, "lr": 1e-3}),
    "frozen layers": lambda storm: FaultChange(
        pretrained=100, prepare=_only(("blocks.2", "blocks.3", "final_norm"))
    ),
    "adapters": lambda storm: FaultChange(
        pretrained=100, prepare=_only(("bias", "norm"))
    ),
    "fine-tuning": lambda storm: FaultChange(
        pretrained=200, train={"lr": 5e-4, "warmup": 0}
    ),
}
