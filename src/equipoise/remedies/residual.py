"""Remedies of the residual stream: branch multipliers, and initial scales for depth.

A branch is what attention or the feed-forward net adds to the stream. Multipliers act
on what a branch returns; initial scales multiply weights and are for a model that has
not been trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import NORMS, anatomy_of
from equipoise.anatomy.sites import Anatomy, Projections, Weight
from equipoise.errors import InputError
from equipoise.remedies.attention_hooks import (
    TORCH,
    multiply_rows,
    projections_of,
    stored_rows,
)
from equipoise.remedies.base import Changes, Count, Positive, RecordedRemedy, Undo


@dataclass(slots=True)
class BranchScale:
    """Multiplies what a branch returns by a number that comes in over some steps."""

    scale: float
    steps: int
    progress: dict[str, Any]

    @property
    def now(self) -> float:
        done = min(1.0, self.progress["step"] / self.steps) if self.steps else 1.0
        return 1 + (self.scale - 1) * done

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * self.now, *output[1:])
        return output * self.now


def branch_outputs(anatomy: Anatomy) -> list[nn.Module]:
    """Return the modules whose outputs are added to the residual stream."""
    if not anatomy.blocks or not anatomy.attention:
        raise InputError(
            f"the blocks of {anatomy.family} are not known, so what they add to the "
            "residual stream cannot be scaled; declare them (docs/families.md)"
        )
    attention = [
        site.module
        if type(site.module).__name__ == TORCH
        else projections_of(site).o.module
        for site in anatomy.attention
    ]
    return attention + [_last_map(m) for m in _last_parts(anatomy)]


def _last_parts(anatomy: Anatomy) -> Iterator[nn.Module]:
    """Yield the last feed-forward module of each block: fc2 after fc1."""
    for name in anatomy.blocks:
        inside = [
            m for n, m in anatomy.feedforwards.items() if n.startswith(f"{name}.")
        ]
        if inside:
            yield inside[-1]


def _last_map(module: nn.Module) -> nn.Module:
    """Return the map itself where a module also normalises and adds, as BERT's does."""
    children = dict(module.named_children())
    if not any(type(m).__name__.endswith(NORMS) for m in children.values()):
        return module
    if "dense" not in children:
        raise InputError(
            f"{type(module).__name__} adds and normalises by itself: its branch cannot "
            "be scaled from outside"
        )
    return children["dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualScale(RecordedRemedy):
    """Multiply what every branch adds to the residual stream.

    While training it comes in over ``steps`` steps, so that the model is the same when
    it is switched on; ``steps=0`` is for before training.
    """

    scale: Positive = 0.5
    steps: Count = 20
    name: ClassVar[str] = "residual_scale"

    @property
    def preserves_function(self) -> bool:
        return self.steps > 0

    def change(self, changes: Changes) -> Undo:
        if self.steps:
            changes.count_steps()
        outputs = branch_outputs(anatomy_of(changes.model))
        scale = BranchScale(self.scale, self.steps, changes.progress)
        for module in outputs:
            changes.hook(module.register_forward_hook(scale))
        return changes.applied(branches=len(outputs), scale=self.scale)


def _is_new(changes: Changes) -> None:
    if changes.optimizer is not None and changes.optimizer.state:
        raise InputError(
            f"{changes.name} is for before training, and this optimiser has taken "
            "steps: build the model and the optimiser anew, apply it, then train"
        )


def _scale_part(changes: Changes, weight: Weight, gain: float) -> None:
    stored: Tensor = getattr(weight.module, weight.attribute)
    axis = 1 if weight.transposed else 0
    factor_R = torch.ones(stored.shape[axis])
    factor_R[stored_rows(weight)] = gain
    new = stored.detach().clone()
    multiply_rows(new, factor_R, axis)
    changes.value(stored, new)


def _feedforward_maps(anatomy: Anatomy) -> list[Weight]:
    """Return the matrices of feed-forward nets; routers and norms left out."""
    routers = {id(router.module) for router in anatomy.routers.values()}
    modules = {
        id(m): m for root in anatomy.feedforwards.values() for m in root.modules()
    }
    return [
        Weight(m)
        for m in modules.values()
        if id(m) not in routers
        and isinstance(getattr(m, "weight", None), nn.Parameter)
        and m.weight.dim() == 2  # type: ignore[operator]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepNormInit(RecordedRemedy):
    """Start with DeepNorm's scales (Wang et al., arXiv 2203.00555), for N blocks.

    W_V, W_O and the feed-forward matrices are multiplied by (8N)^(-1/4). Where norms
    close the residual sum, LN(αx + f) with α = (2N)^(1/4) is LN(x + f/α): the branches
    are multiplied by 1/α. Pre-LN models get the initial scales alone.
    """

    name: ClassVar[str] = "deepnorm_init"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        _is_new(changes)
        anatomy = anatomy_of(changes.model)
        branches, depth = branch_outputs(anatomy), len(anatomy.blocks)
        maps = [projections_of(site) for site in anatomy.attention]
        weights = [w for m in maps for w in (m.v, m.o)]
        with torch.no_grad():
            for weight in [*weights, *_feedforward_maps(anatomy)]:
                _scale_part(changes, weight, (8 * depth) ** -0.25)
        if anatomy.placement == "post":
            scale = BranchScale((2 * depth) ** -0.25, 0, changes.progress)
            for module in branches:
                changes.hook(module.register_forward_hook(scale))
        return changes.applied(blocks=depth, placement=anatomy.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathInit(RecordedRemedy):
    """Start with W_Q, W_K, W_V and W_O times N^(-1/4).

    A map that makes queries and keys is met twice, and scaled once.
    """

    name: ClassVar[str] = "path_init"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        _is_new(changes)
        anatomy = anatomy_of(changes.model)
        branch_outputs(anatomy)  # refuses a changes.model whose blocks are not known
        depth = len(anatomy.blocks)
        for site in anatomy.attention:
            maps = _distinct(projections_of(site))
            with torch.no_grad():
                for weight in maps:
                    _scale_part(changes, weight, depth**-0.25)
        return changes.applied(blocks=depth)


def _distinct(maps: Projections) -> list[Weight]:
    """Return Q, K, V and O; a map that makes queries and keys once."""
    q, k, v, o = maps.q, maps.k, maps.v, maps.o
    return [q, v, o] if q == k else [q, k, v, o]
