"""Which part of a network bends the loss: its Hessian as an exact sum over operations.

For parameters w, every operation φ with inputs z, the derivative J of z by w and the
ordinary cotangent λ at its result add one term, and nothing else does:

    H = Σ_φ Jᵀ·∇²⟨λ, φ⟩·J        (the loss is the last φ, with λ = 1)

Along a direction v one forward pass with tangents ż = Jv and one backward pass with
cotangents λ give vᵀHv = Σ_φ żᵀ∇²⟨λ, φ⟩ż, term by term; and, on the side, Hv itself, by
which the sum is checked on every call.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.auditing.curvature.attribution_nodes import Node
from equipoise.auditing.curvature.attribution_pass import Direction, differentiated
from equipoise.auditing.curvature.attribution_rules import rule_of
from equipoise.auditing.curvature.objective import Loss, calls, cast, mean_loss
from equipoise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the operations of one kind in one module add to vᵀHv."""

    site: str
    """Module name as in ``named_modules()``; "" is outside every module."""
    kind: str
    """norm, scores, softmax, mix, projection, product, activation, loss, or a name."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """vᵀHv, and the terms it is the sum of."""

    shares: tuple[Share, ...]
    total: float
    """vᵀHv from the Hessian product itself."""
    residual: float
    """\\|Σ shares − total\\|: rounding, unless an operation was missed."""

    def grouped(self, name: Callable[[Share], str]) -> dict[str, float]:
        """Return the terms summed under names, in the order of the network."""
        sums: dict[str, float] = defaultdict(float)
        for share in self.shares:
            sums[name(share)] += share.value
        return dict(sums)

    def by_sublayer(self) -> dict[str, float]:
        """Return vᵀHv per sublayer: ``blocks.0.attention``, ``blocks.0.ln_1``, …"""
        return self.grouped(lambda share: sublayer(share.site) or share.kind)

    def by_kind(self) -> dict[str, float]:
        """Return vᵀHv per kind of operation."""
        return self.grouped(lambda share: share.kind)


def attributed(
    model: nn.Module,
    batch: Any,
    direction: Direction,
    *,
    loss: Loss | None = None,
    micro_batch: int | None = None,
    dtype: torch.dtype | None = None,
) -> Attribution:
    """Return vᵀHv of a model's mean loss along a direction, term by term.

    Args:
        model: Any PyTorch model; a twin with the same weights is differentiated.
        batch, loss, micro_batch, dtype: As for :func:`..curvature.hessian`.
        direction: The tangent of each parameter that moves.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> v = {"weight": torch.ones(1, 2)}
        >>> found = attributed(model, (x, torch.zeros(2, 1)), v)
        >>> found.total, [(s.kind, s.value) for s in found.shares]
        (2.0, [('loss', 2.0)])
    """
    twin = ModelCopy(model, dtype=dtype)
    direction = _matched(twin, direction)
    parts = cast(calls(model, batch, micro_batch=micro_batch), _dtype(twin))
    sums: dict[tuple[str, str], float] = defaultdict(float)

    def heard(node: Node, cotangent: Tensor) -> None:
        products = rule_of(node.call)(node.call, cotangent)
        for product, tangent in zip(products, node.call.tangents, strict=True):
            sums[node.site, node.kind] += _dot(product, tangent)

    total = 0.0
    for part in parts:
        products = differentiated(twin, part, direction, loss or mean_loss, heard)
        total += sum(_dot(products[name], v) for name, v in direction.items())
    # Cotangents arrive from the end of the network; people read from the beginning.
    return _attribution(dict(reversed(sums.items())), total)


def _attribution(sums: Mapping[tuple[str, str], float], total: float) -> Attribution:
    shares = (Share(site=s, kind=k, value=v) for (s, k), v in sums.items())
    residual = abs(sum(sums.values()) - total)
    return Attribution(shares=tuple(shares), total=total, residual=residual)


def combined(parts: Iterable[Attribution]) -> Attribution:
    """Return the mean of attributions: over micro-batches, or over random probes."""
    parts = tuple(parts)
    if not parts:
        raise InputError("no attribution to combine")
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        for share in part.shares:
            sums[share.site, share.kind] += share.value / len(parts)
    return _attribution(sums, sum(part.total for part in parts) / len(parts))


def trace_attributed(
    model: nn.Module,
    batch: Any,
    *,
    probes: int,
    generator: torch.Generator,
    loss: Loss | None = None,
    micro_batch: int | None = None,
    dtype: torch.dtype | None = None,
) -> Attribution:
    """Return tr H term by term: the mean of zᵀHz over random signs z (Hutchinson)."""
    if probes < 1:
        raise InputError(f"probes {probes}: at least one is needed")
    moving = {n: p for n, p in model.named_parameters() if p.requires_grad}
    settings: dict[str, Any] = {
        "loss": loss,
        "micro_batch": micro_batch,
        "dtype": dtype,
    }
    return combined(
        attributed(model, batch, _signs(moving, generator), **settings)
        for _ in range(probes)
    )


def sublayer(site: str) -> str:
    """Return a site cut after the part that follows its block number.

    >>> sublayer("model.layers.3.self_attn.q_proj"), sublayer("lm_head")
    ('model.layers.3.self_attn', 'lm_head')
    """
    found = re.match(r"(.*?\.\d+\.[^.]+)", site)
    return found[1] if found else site


def _signs(moving: Mapping[str, Tensor], generator: torch.Generator) -> Direction:
    def signs(like: Tensor) -> Tensor:
        bits = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
        return (2 * bits - 1).to(like)

    return {name: signs(parameter) for name, parameter in moving.items()}


def _matched(twin: ModelCopy, direction: Direction) -> dict[str, Tensor]:
    for name, tangent in direction.items():
        if name not in twin.parameters:
            raise InputError(f"direction names {name!r}, which is no parameter")
        if tangent.shape != twin.parameters[name].shape:
            got, wanted = tuple(tangent.shape), tuple(twin.parameters[name].shape)
            raise InputError(f"direction of {name!r} is {got}; the parameter {wanted}")
    return {n: v.detach().to(twin.parameters[n]) for n, v in direction.items()}


def _dtype(twin: ModelCopy) -> torch.dtype:
    return next(iter(twin.parameters.values())).dtype


def _dot(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ summed in float64: terms cancel."""
    return float((a.double() * b.double()).sum())
