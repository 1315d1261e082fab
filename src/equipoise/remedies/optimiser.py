"""Remedies of the optimiser: learning rate, β₂ and ε, moments, rates by group.

Options are changed for the length of each step and put back after it, so a scheduler,
or a loop that sets its own rate before every step, is not disturbed.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sharding import local_part, whole
from equipoise.anatomy.sites import named
from equipoise.errors import InputError
from equipoise.remedies.base import (
    Changes,
    Count,
    Positive,
    RecordedRemedy,
    Undo,
    same_bits,
)

Options = Callable[[dict[str, Any]], dict[str, Any]]
"""A parameter group → the options it has during a step."""


@dataclass(slots=True)
class StepOptions:
    """All options that remedies change in one optimiser, in the order applied."""

    chosen: list[Options] = field(default_factory=list)
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.after()  # of a step that raised
        for group in optimizer.param_groups:
            before: dict[str, Any] = {}
            self.saved.append((group, before))
            for options in self.chosen:
                new = options(group)
                # Only these: some optimisers count their steps in a group.
                before.update({k: group[k] for k in new if k not in before})
                group.update(new)

    def after(self, *_: object) -> None:
        for group, before in self.saved:
            group.update(before)
        self.saved.clear()


def during_steps(changes: Changes, options: Options) -> None:
    """Use other options in every step until it is undone."""
    optimizer = changes.required_optimizer
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    shared = next((o for o in owners if isinstance(o, StepOptions)), None)
    if shared is None:
        shared = StepOptions()
        optimizer.register_step_pre_hook(shared.before)
        optimizer.register_step_post_hook(shared.after)
    shared.chosen.append(options)
    changes.undo_by(lambda: _forget(optimizer, shared, options))


def _forget(optimizer: Optimizer, shared: StepOptions, options: Options) -> None:
    shared.after()
    shared.chosen.remove(options)
    for hooks in (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ):
        for key, hook in list(hooks.items()):
            if not shared.chosen and getattr(hook, "__self__", None) is shared:
                del hooks[key]


def _warm_up(changes: Changes, steps: int, scale: float) -> None:
    """Scale the rate; it grows to that over the next steps."""
    changes.count_steps()

    def lower(group: dict[str, Any]) -> dict[str, Any]:
        done = (changes.progress["step"] + 1) / (steps + 1)
        return {"lr": group["lr"] * scale * min(1.0, done)}

    during_steps(changes, lower)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate(RecordedRemedy):
    """Multiply the learning rate, whatever schedule sets it, after a new warm-up."""

    scale: Positive = 0.5
    warmup: Count = 20
    """Steps over which the rate grows to its new value."""
    name: ClassVar[str] = "learning_rate"

    def change(self, changes: Changes) -> Undo:
        _warm_up(changes, self.warmup, self.scale)
        return changes.applied(scale=self.scale, warmup=self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReset(RecordedRemedy):
    """Forget the optimiser's moments, and warm the learning rate up again."""

    warmup: int = 20
    name: ClassVar[str] = "optimizer_reset"

    def change(self, changes: Changes) -> Undo:
        optimizer = changes.required_optimizer
        state, before = optimizer.state, dict(optimizer.state)
        state.clear()

        def back() -> None:
            if not state:  # no step since: nothing new was learned
                here = {p for g in optimizer.param_groups for p in g["params"]}
                state.update((p, s) for p, s in before.items() if p in here)

        changes.undo_by(back, "state")
        _warm_up(changes, self.warmup, 1.0)
        return changes.applied(warmup=self.warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beta2(RecordedRemedy):
    """Set Adam's β₂, and ε if given; v̂ = v/(1-β₂ᵗ) stays what it is.

    Without rescaling v, a β₂ that falls from 0.999 to 0.95 at step 20 would make the
    next update 5.7 times too large.
    """

    beta2: float = 0.95
    epsilon: float | None = None
    name: ClassVar[str] = "beta2"

    def __post_init__(self) -> None:
        if not 0 <= self.beta2 < 1 or not (self.epsilon is None or self.epsilon > 0):
            raise InputError(
                f"β₂ lies in [0, 1) and ε above 0, not {self.beta2}, {self.epsilon}"
            )

    def change(self, changes: Changes) -> Undo:
        groups = changes.required_optimizer.param_groups
        if not all("betas" in group for group in groups):
            kind = type(changes.required_optimizer).__name__
            raise InputError(f"{kind} has no β₂; beta2 is for Adam and its kin")
        for group in groups:
            self._remap(changes, group)
        during_steps(changes, self._options)
        return changes.applied(beta2=self.beta2)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        new = {"betas": (group["betas"][0], self.beta2)}
        return new if self.epsilon is None else {**new, "eps": self.epsilon}

    def _remap(self, changes: Changes, group: dict[str, Any]) -> None:
        old = float(group["betas"][1])
        for parameter in group["params"]:
            state = changes.required_optimizer.state.get(parameter, {})
            if "exp_avg_sq" in state:
                _rescale(changes, state, old, self.beta2)


def _rescale(changes: Changes, state: dict[str, Any], old: float, new: float) -> None:
    v = local_part(state["exp_avg_sq"])
    before, after = v.clone(), v * _ratio(state, old, new)
    v.copy_(after)

    def back() -> None:
        # After further steps v̂ stays what it is, and not v.
        v.copy_(before if same_bits(v, after) else v * _ratio(state, new, old))

    changes.undo_by(back, "state")


def _ratio(state: dict[str, Any], old: float, new: float) -> float:
    """Return (1-newᵗ)/(1-oldᵗ)."""
    t = float(state["step"])
    return (1 - new**t) / (1 - old**t) if t else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLearningRates(RecordedRemedy):
    """Give each block its own share of the learning rate.

    From measured curvature the share is √(median λ/λ), at most 1: the sharper block
    moves less. Without it, blocks whose Adam update is large beside their weights are
    brought down to twice the median block's.
    """

    curvature: Mapping[str, float] = field(default_factory=dict)
    """Block or module name → its largest curvature, as ``equipoise curvature`` says."""
    most: float = 2.0
    """Relative updates above this many medians are brought down to it."""
    name: ClassVar[str] = "group_learning_rates"

    def change(self, changes: Changes) -> Undo:
        modules = dict(named(changes.model))
        sizes = self._sizes(changes, modules)
        middle = statistics.median(sizes.values())
        given = bool(self.curvature)
        shares = {
            site: min(1.0, (middle / x) ** 0.5 if given else self.most * middle / x)
            for site, x in sizes.items()
            if x > 0
        }
        by_parameter = {
            p: share
            for site, share in shares.items()
            for p in modules[site].parameters()
            if share < 1
        }
        scale_updates(changes, list(by_parameter), lambda p, _: by_parameter[p])
        slowest = min(shares, key=shares.__getitem__, default="")
        return changes.applied(
            blocks=len(shares), slowest=slowest, share=shares.get(slowest, 1.0)
        )

    def _sizes(
        self, changes: Changes, modules: Mapping[str, nn.Module]
    ) -> dict[str, float]:
        unknown = sorted(set(self.curvature) - set(modules))
        if unknown:
            raise InputError(f"no module called {', '.join(unknown)} has a curvature")
        if self.curvature:
            return {site: float(x) for site, x in self.curvature.items()}
        blocks = anatomy_of(changes.model).blocks
        state = changes.required_optimizer.state
        if not blocks or not any("exp_avg_sq" in s for s in state.values()):
            raise InputError(
                "group_learning_rates needs an Adam that has taken a step, and blocks; "
                "or give it curvature={'blocks.0': 12.0, …}"
            )
        return {name: _relative(block, state) for name, block in blocks.items()}


def _relative(block: nn.Module, state: Mapping[Tensor, Any]) -> float:
    """Return ‖m/√v‖/‖W‖ over the matrices of a block: updates per unit of the rate."""
    moved = weights = 0.0
    for p in block.parameters():
        if p.dim() >= 2 and "exp_avg_sq" in state.get(p, {}):
            m, v = state[p]["exp_avg"], state[p]["exp_avg_sq"]
            moved += float(whole((m / (v.sqrt() + 1e-8)).square().sum()))
            weights += float(whole(p.detach().square().sum()))
    return (moved / weights) ** 0.5 if weights else 0.0


def scale_updates(
    changes: Changes,
    parameters: list[nn.Parameter],
    share: Callable[[nn.Parameter, Tensor], Tensor | float],
) -> None:
    """After every step keep only a share of how far each parameter moved.

    Holds a copy of these parameters during the step.
    """
    before: dict[nn.Parameter, Tensor] = {}

    def remember(optimizer: Optimizer) -> None:
        before.update((p, p.detach().clone()) for p in parameters)

    def shorten(optimizer: Optimizer) -> None:
        for p, old in before.items():
            moved = p.detach() - old
            kept = share(p, moved)
            here = local_part(p.detach())
            here.copy_(local_part(old) + local_part(moved) * kept)
        before.clear()

    changes.before_step(remember)
    changes.after_step(shorten)
