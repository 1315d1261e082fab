"""Curvature of the loss at the present weights, against what the step size allows.

Axes, in this file:  N every trainable parameter, flat.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.model_copy import ModelCopy
from equipoise.anatomy.sharding import is_sharded
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.errors import InputError
from equipoise.numerics.edge_of_stability import (
    adam_scale,
    adam_threshold,
    sgd_threshold,
)
from equipoise.numerics.hessian_products import HessianProduct
from equipoise.numerics.spectra.estimate import Estimate, Search
from equipoise.numerics.spectra.extremes import top_eigenvalues
from equipoise.probes.logits import output_logits
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.stored_batch import (
    CrossEntropy,
    StoredBatch,
    batch_length,
    cut,
    recover_cross_entropy,
    store_batch,
)

ADAMS = ("Adam", "AdamW")
SECOND = ("max_exp_avg_sq", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScale:
    """D, per parameter, and the curvature of D^{½}HD^{½} that the step size allows.

    D is 1 for SGD and 1/P for Adam, times this group's share of the step size; what
    the optimiser does not hold does not move: 0.
    """

    kind: str
    by_name: dict[str, Tensor]
    threshold: float
    lr: float


def step_scale(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> StepScale:
    """Return how an optimiser scales the parameters of a model, by name."""
    kind = _kind(optimizer)
    allowed = {
        id(p): a for group, a in _allowed(optimizer, kind) for p in group["params"]
    }
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    known = [name for name, p in parameters.items() if id(p) in allowed]
    if not known:
        raise InputError("the optimiser holds none of this model's parameters")
    least = min(allowed[id(parameters[name])] for name in known)
    if math.isinf(least):
        raise InputError("every step size of the optimiser is 0: nothing can overshoot")
    scales = {
        name: (least / allowed[id(parameters[name])])
        * _inverse(optimizer, kind, parameters[name], groups[id(parameters[name])])
        for name in known
    }
    idle = {
        name: torch.zeros((), dtype=p.dtype, device=p.device)
        for name, p in parameters.items()
        if name not in scales
    }
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    return StepScale(kind=kind, by_name={**scales, **idle}, threshold=least, lr=lr)


def _kind(optimizer: Optimizer) -> str:
    names = {base.__name__ for base in type(optimizer).__mro__}
    if "SGD" in names:
        return "sgd"
    if names & set(ADAMS) and type(optimizer).__name__ not in ("NAdam", "RAdam"):
        return "adam"
    raise InputError(
        f"{type(optimizer).__name__}: the curvature a step allows is known for SGD, "
        "Adam and AdamW"
    )


def _allowed(optimizer: Optimizer, kind: str) -> Iterator[tuple[dict[str, Any], float]]:
    for group in optimizer.param_groups:
        lr = float(group["lr"])
        if lr == 0:
            yield group, math.inf
        elif kind == "adam":
            yield group, adam_threshold(lr=lr, beta1=float(group["betas"][0]))
        else:
            yield (
                group,
                sgd_threshold(
                    lr=lr,
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                ),
            )


def _inverse(
    optimizer: Optimizer, kind: str, parameter: Tensor, group: dict[str, Any]
) -> Tensor:
    if kind == "sgd":
        return torch.ones((), dtype=parameter.dtype, device=parameter.device)
    state = optimizer.state.get(parameter, {})
    second = next((state[name] for name in SECOND if name in state), None)
    if second is None:
        if not parameter.requires_grad or parameter.grad is None:
            return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        raise InputError("Adam has not taken a step: it has no second moment yet")
    full: Tensor = getattr(second, "full_tensor", lambda: second)()
    betas = tuple(float(beta) for beta in group["betas"])
    scale = adam_scale(
        full.detach(),
        step=float(state["step"]),
        betas=(betas[0], betas[1]),
        eps=float(group["eps"]),
    )
    return 1 / scale


LARGEST = 200_000_000
SHARDED = Reason("weights_sharded", hides=("curvature.*",))


@dataclass(slots=True)
class Sharpness:
    """Emit λ_max of the stored batch's Hessian in the optimiser's own coordinates.

    The first sampled batch is stored for the run, so that readings compare. The
    model is differentiated as a copy, in evaluation mode: its random state, gradients
    and buffers are not touched. With several ranks each reads its own batch.
    """

    name: str = "curvature"
    every: int = 10
    """Read at one in so many sampled steps."""
    samples: int = 8
    """Of the stored batch."""
    search: Search = Search(tolerance=0.05, at_most=16)
    memory: int = 8
    """Vectors of the size of the model."""
    largest: int = LARGEST
    """Models with more parameters are not read."""
    _count: int = -1
    _due: bool = False
    _batch: StoredBatch | None = None
    _captured: tuple[Any, Any, Tensor, Tensor] | None = None
    _start: Tensor | None = None
    _anatomy: Anatomy | None = None
    _call: tuple[Any, Any] = field(default=((), {}))

    def begin_pass(self) -> None:
        self._count += 1
        self._due = self._count % self.every == 0

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        if self._batch is None and self._readable(anatomy, emit):
            listen = guarded(partial(self._forward, guarded))
            yield hooks.after(anatomy.model, listen, with_kwargs=True)

    def _readable(self, anatomy: Anatomy, emit: Emit) -> bool:
        weights = list(anatomy.model.parameters())
        small = sum(p.numel() for p in weights) <= self.largest
        if any(is_sharded(p) for p in weights):
            emit.not_read("", SHARDED)
            return False
        return small

    def _forward(
        self, guarded: Guarded, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if isinstance(getattr(output, "loss", None), Tensor):
            self._store(args, kwargs, None)
            return
        z = output_logits(output)
        if z is not None and z.requires_grad and z.ndim >= 2:
            z.register_hook(guarded(partial(self._backward, args, kwargs, z.detach())))

    def _backward(self, args: Any, kwargs: Any, z: Tensor, g: Tensor) -> None:
        """Tensor hooks die with the graph: there is nothing to take off later.

        What the loss was is asked later: a look at a number here stops the device.
        """
        if self._batch is None and self._captured is None:
            call = (args, dict(kwargs))
            copied = cut(call, slice(None), length=batch_length(call))
            self._captured = (*copied, z, g.clone())

    def _store_captured(self) -> None:
        """Store what was captured, if its loss is one that we know."""
        if self._captured is None:
            return
        (args, kwargs, z, g), self._captured = self._captured, None
        entropy = recover_cross_entropy(z, g)
        if entropy is not None:
            self._store(args, kwargs, entropy)

    def _store(self, args: Any, kwargs: Any, entropy: CrossEntropy | None) -> None:
        self._batch = store_batch(args, kwargs, entropy, at_most=self.samples)

    def on_update(self, optimizer: Optimizer, emit: Emit) -> None:
        """Read the curvature at the weights that the step has just made."""
        self._store_captured()
        if self._batch is None or self._anatomy is None or not self._due:
            return
        self._due = False
        copy = ModelCopy(self._anatomy.model)
        names = copy.trainable
        scale = _scale(optimizer, copy)
        found = self._sharpest(copy, names, scale)
        kind = "" if scale is None or scale.kind == "sgd" else "preconditioned_"
        _emit(emit, f"curvature.{kind}sharpness", found.value)
        _emit(emit, "curvature.error", found.error)
        if scale is not None:
            _emit(emit, "curvature.edge_ratio", found.value / scale.threshold)

    def _sharpest(
        self, copy: ModelCopy, names: list[str], scale: StepScale | None
    ) -> Estimate:
        at = [copy.parameters[name] for name in names]
        product = HessianProduct([partial(self._value, copy, names)], at)
        root_N = _root(at, names, scale)

        def matvec(v_N: Tensor) -> Tensor:
            return root_N * product(root_N * v_N)

        (found,) = top_eigenvalues(
            matvec, self._begin(at), search=self.search, memory=self.memory
        )
        self._start = None if found.vector is None else found.vector.clone()
        return found

    def _begin(self, at: list[Tensor]) -> Tensor:
        """Return the last answer with a little noise: it must be able to turn."""
        width = sum(p.numel() for p in at)
        rng = torch.Generator().manual_seed(self._count)
        noise_N = torch.randn(width, generator=rng).to(at[0])
        if self._start is None or len(self._start) != width:
            return noise_N
        turned_N: Tensor = self._start + 0.1 * noise_N / noise_N.norm()
        return turned_N

    def _value(self, copy: ModelCopy, names: list[str], values: Any) -> Tensor:
        assert self._batch is not None
        chosen = dict(zip(names, values, strict=True))
        output = copy(chosen, self._batch.args, self._batch.kwargs)
        return self._batch.loss(output)


def _scale(optimizer: Optimizer, copy: ModelCopy) -> StepScale | None:
    """Return D, or None for an optimiser whose edge is not known: plain sharpness."""
    try:
        return step_scale(optimizer, dict(copy.body.named_parameters()))
    except InputError:
        return None


def _root(at: list[Tensor], names: list[str], scale: StepScale | None) -> Tensor:
    if scale is None:
        return torch.ones((), dtype=at[0].dtype, device=at[0].device)
    return torch.cat(
        [
            scale.by_name[name].to(p).sqrt().expand_as(p).reshape(-1)
            for name, p in zip(names, at, strict=True)
        ]
    )


def _emit(emit: Emit, quantity: str, value: float) -> None:
    emit("", quantity, torch.tensor(value, dtype=torch.float64), how="mean")
