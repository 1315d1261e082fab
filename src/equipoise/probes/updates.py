"""How far the optimiser moves each layer, and which weights do not move at all."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.numerics.token_statistics import adam_norms
from equipoise.probes.gradients import owned_parameters
from equipoise.probes.protocols import Emit, WithAnatomy
from equipoise.probes.sharding import copy_count, shares

COPIED_BYTES = 1 << 26
"""Weights copied at once, before the step of an optimiser that is not Adam."""
TOO_LARGE = Reason("weights_too_large", hides=("update.*",))
PROBED = 256
"""Weights of each block that are remembered from one sampled step to the next."""
Layer = tuple[str, list[nn.Parameter]]
State = dict[str, Any]


@dataclass(slots=True)
class Updates(WithAnatomy):
    """Emit ‖Δw‖₂ and ‖w‖₂ per block, whatever the optimisers.

    Of Adam and AdamW Δw = lr·m̂/(√v̂ + ε) is in the optimiser's own state once it has
    stepped: no copy is made, and decoupled weight decay is not part of Δw. Of any other
    optimiser Δw is the weights after the step minus a copy made before it. The copies
    are at most 64 MiB at once; of a larger model the blocks take turns, some in each
    sampled step.
    """

    name: str = "updates"
    ranks: int = 1
    """Over how many ranks the parts will be put together."""
    copied: int = COPIED_BYTES
    _before: dict[int, Tensor] = field(default_factory=dict)
    """id of a parameter → its copy."""
    _turns: "WeakKeyDictionary[Optimizer, int]" = field(
        default_factory=WeakKeyDictionary
    )
    _parts: dict[str, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Block → optimiser → ‖Δw‖ and ‖w‖ of what it moves there in this step."""

    def begin_step(self, step: int) -> None:
        self._parts.clear()

    def before_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Copy the weights of the blocks whose turn it is."""
        if self._anatomy is None or _is_adam(optimizer):
            return
        turn = self._turns.get(optimizer, 0)
        self._turns[optimizer] = turn + 1
        groups, too_large = _groups(self._layers(optimizer, ahead=True), self.copied)
        for site in too_large:
            emit.not_read(site, TOO_LARGE)
        for _, parameters in groups[turn % len(groups)] if groups else ():
            for parameter in parameters:
                copy = local_part(parameter.detach()).clone()
                self._before[id(parameter)] = copy

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Emit the update that ``optimizer.step()`` has just applied."""
        before, self._before = self._before, {}
        if self._anatomy is None:
            return
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        states = optimizer.state if _is_adam(optimizer) else {}
        for site, parameters in self._layers(optimizer):
            if all("exp_avg" in states.get(p, ()) for p in parameters):
                rates = [groups[id(p)] for p in parameters]
                norms_P = update_norms([states[p] for p in parameters], rates)
            elif all(id(p) in before for p in parameters):
                distances = [_distance(p, before[id(p)]) for p in parameters]
                norms_P = torch.stack(distances)
            else:
                continue
            sizes = torch.stack(shares(parameters, self.ranks))
            parts = self._parts.setdefault(site, {})
            parts[id(optimizer)] = self._norm(parameters, norms_P), _norm(sizes)
            moved, held = map(torch.stack, zip(*parts.values(), strict=True))
            emit(site, "update.norm", _norm(moved), how="norm")
            emit(site, "weight.norm", _norm(held), how="norm")

    def _norm(self, parameters: list[nn.Parameter], norms_P: Tensor) -> Tensor:
        """Return this rank's share of the norm of all."""
        copies = [copy_count(parameter, self.ranks) for parameter in parameters]
        if set(copies) != {1}:
            shared = [x * n**-0.5 for x, n in zip(norms_P, copies, strict=True)]
            norms_P = torch.stack(shared)
        return _norm(norms_P)

    def _layers(self, optimizer: Optimizer, *, ahead: bool = False) -> Iterator[Layer]:
        """Yield each block with the parameters of it that this optimiser moves.

        ``ahead`` of a step with a closure, gradients are still to come.
        """
        assert self._anatomy is not None
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        layers: dict[str, list[nn.Parameter]] = {}
        for site, parameter in owned_parameters(self._anatomy):
            moves = parameter.grad is not None or (ahead and parameter.requires_grad)
            if id(parameter) in theirs and moves:
                layers.setdefault(site, []).append(parameter)
        yield from layers.items()


def _is_adam(optimizer: Optimizer) -> bool:
    """Not of NAdam, RAdam and others: their state has the same names."""
    return type(optimizer) in (Adam, AdamW)


def _groups(layers: Iterator[Layer], most: int) -> tuple[list[list[Layer]], list[str]]:
    """Return layers in groups of at most ``most`` bytes, and those that are larger.

    Of a sharded parameter all bytes count, so that every rank makes the same groups.
    """
    groups: list[list[Layer]] = []
    too_large, room = list[str](), 0
    for layer in layers:
        size = sum(p.numel() * p.element_size() for p in layer[1])
        if size > most:
            too_large.append(layer[0])
            continue
        if size > room:
            groups.append([])
            room = most
        groups[-1].append(layer)
        room -= size
    return groups, too_large


def _distance(parameter: Tensor, before: Tensor) -> Tensor:
    after = local_part(parameter.detach())
    wide = torch.promote_types(after.dtype, torch.float32)
    difference = before.to(wide).neg_().add_(after)
    norm: Tensor = torch.linalg.vector_norm(difference)
    return norm


def _norm(norms_P: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(norms_P, dtype=torch.float64)
    return norm


def update_norms(states: list[State], groups: list[State]) -> Tensor:
    """Return the norms of this rank's parts of the updates, without forming them."""
    if any(map(_on_device, states, groups)):
        updates = map(adam_update, states, groups)
        return torch.stack([torch.linalg.vector_norm(x.float()) for x in updates])
    scales, moments = list(map(_scale, states, groups)), list(map(_moments, states))
    return adam_norms(
        [m for m, _ in moments],
        [v for _, v in moments],
        floors=[floor for floor, _ in scales],
        rates=[rate for _, rate in scales],
    )


def _on_device(state: State, group: State) -> bool:
    """Return whether the number of steps, or a decay, would have to be waited for."""
    step = state["step"]
    waits = isinstance(step, Tensor) and not step.is_cpu
    return waits or isinstance(group["betas"][0], Tensor)


def _scale(state: State, group: State) -> tuple[float, float | Tensor]:
    """Return what is added to √v, and what multiplies m/(√v + …)."""
    step, (beta1, beta2) = state["step"], group["betas"]
    # Through NumPy: a monitor may not read a scalar out of the model's graph.
    count = float(step.detach().numpy() if isinstance(step, Tensor) else step)
    root = (1 - beta2**count) ** 0.5
    return group["eps"] * root, group["lr"] * root / (1 - beta1**count)


def _moments(state: State) -> tuple[Tensor, Tensor]:
    """Return this rank's part of m and v; Adam takes complex numbers for two reals."""
    moments = state["exp_avg"], state.get("max_exp_avg_sq", state["exp_avg_sq"])
    m, v = map(local_part, moments)
    return (torch.view_as_real(m), torch.view_as_real(v)) if m.is_complex() else (m, v)


def adam_update(state: State, group: State) -> Tensor:
    """Return this rank's part of lr·m̂/(√v̂ + ε), as Adam and AdamW apply it.

    With the bias corrections c₁ and c₂ it is lr·(√c₂/c₁)·m/(√v + ε√c₂): one visit to
    each of the two moments.
    """
    beta1, beta2 = group["betas"]
    step = torch.as_tensor(state["step"], dtype=torch.float64)
    root = (1 - beta2**step).sqrt()
    m, v = _moments(state)
    below = v.sqrt().add_((group["eps"] * root).to(v))
    scale = group["lr"] * root / (1 - beta1**step)
    update: Tensor = torch.div(m, below, out=below).mul_(scale.to(m))
    return update


@dataclass(slots=True)
class UnchangedWeights:
    """Emit the share of weights that are what they were at the last sampled step.

    Read before the optimiser moves them, at up to 256 places of each block's largest
    parameter that an optimiser moves: it holds it, at a rate that is not zero, and had
    a gradient there. What is frozen may keep a gradient of an earlier training. A
    weight that is stored in too few bits stays where it is however often it is updated.
    """

    name: str = "unchanged weights"
    _before: dict[str, tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    """Block → which parameter was remembered, its weights, and which had a gradient."""
    _held: "WeakKeyDictionary[Optimizer, set[int]]" = field(
        default_factory=WeakKeyDictionary
    )
    """Optimiser → the parameters that it moved in its last sampled step."""
    _moved: set[int] = field(default_factory=set)
    """Those moved since the last reading: micro-batches share their weights."""

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        if self._before and not self._moved:
            return
        moved, self._moved = self._moved, set()
        held = set().union(*self._held.values()) if self._held else None
        for site, parameter in _largest(anatomy, held).items():
            grad = parameter.grad
            assert grad is not None
            w, g = _probed(parameter.detach()), _probed(grad)
            key, before, active = self._before.get(site, (0, w, g))
            if key == id(parameter) and before.shape == w.shape == active.shape:
                if key not in moved:
                    continue
                # An expert without a token had no gradient: no update of it is lost.
                same = ((before == w) & active).sum() / active.sum().clamp(min=1)
                emit(site, "update.unchanged", same, how="mean")
            self._before[site] = id(parameter), w.clone(), g != 0

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Note what the optimiser has moved; a rate in a tensor is not waited for."""
        groups = [
            group["params"]
            for group in optimizer.param_groups
            if isinstance(rate := group.get("lr"), Tensor) or rate != 0
        ]
        moved = {id(p) for group in groups for p in group if p.grad is not None}
        self._held[optimizer] = moved
        self._moved |= moved


def _largest(anatomy: Anatomy, held: set[int] | None) -> dict[str, nn.Parameter]:
    """Return of each block the largest parameter that is held, or else trained."""
    found: dict[str, nn.Parameter] = {}
    for site, parameter in owned_parameters(anatomy):
        if parameter.grad is None or site not in anatomy.blocks:
            continue
        if not (parameter.requires_grad if held is None else id(parameter) in held):
            continue
        if site not in found or parameter.numel() > found[site].numel():
            found[site] = parameter
    return found


def _probed(x: Tensor) -> Tensor:
    """Return this rank's numbers at places that are spread evenly."""
    flat = local_part(x).reshape(-1)
    return flat[:: max(1, flat.numel() // PROBED)][:PROBED]
