"""Which part of a network bends the loss: its Hessian as an exact sum over operations.

Axes, in this file:  N all parameters, flat, in the order of ``named_parameters`` ·
Z all numbers that one operation reads and that move.

For parameters w, every operation φ with inputs z, the derivative J of z by w and the
ordinary cotangent λ at its result add one term, and nothing else does:

    H = Σ_φ Jᵀ·∇²⟨λ, φ⟩·J        (the loss is the last φ, with λ = 1)

Along a direction v one forward pass with tangents ż = Jv and one backward pass with
cotangents λ give vᵀHv = Σ_φ żᵀ∇²⟨λ, φ⟩ż, term by term; and, on the side, Hv itself, by
which the sum is checked on every call. Of a small network ``node_hessians`` gives the
terms as full matrices.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.auditing.curvature.attribution_nodes import Node, Report, observed
from equipoise.auditing.curvature.attribution_rules import rule_of
from equipoise.auditing.curvature.objective import Call, Loss, Options, prepared
from equipoise.errors import InputError

Direction = Mapping[str, Tensor]
"""Parameter name → tangent. A parameter that is absent does not move."""
OnCotangent = Callable[[Node, Tensor], None]
"""Takes a node and the cotangent at its result, on the way back."""


def differentiated(
    model_copy: ModelCopy,
    part: Call,
    direction: Direction,
    loss: Loss,
    on_cotangent: OnCotangent,
) -> dict[str, Tensor]:
    """Run forward with tangents and back with cotangents; return Hv by parameter."""

    def report(node: Node, result: Tensor) -> None:
        def hook(cotangent: Tensor | None) -> None:
            # One of several results that the loss does not read has none.
            if cotangent is not None:
                on_cotangent(node, _plain(cotangent))

        if result.requires_grad:
            result.register_hook(hook)

    with forward_ad.dual_level(), torch.enable_grad():
        duals = _duals(model_copy, direction)
        value = _value(model_copy, part, duals, loss, report)
        # With a graph, for its own sake unused: backward kernels without a forward
        # derivative (SiLU's) are then made of plain operations, which have one.
        slopes = torch.autograd.grad(
            part.weight * value,
            list(duals.values()),
            create_graph=True,
            allow_unused=True,
        )
        return {
            name: _tangent(slope, direction[name])
            for name, slope in zip(duals, slopes, strict=True)
        }


def moved(
    model_copy: ModelCopy, part: Call, direction: Direction, loss: Loss
) -> list[Node]:
    """Return every node of a pass with its tangents, without going back."""
    nodes: list[Node] = []
    with forward_ad.dual_level(), torch.no_grad():
        duals = _duals(model_copy, direction)
        _value(model_copy, part, duals, loss, lambda node, _: nodes.append(node))
    return nodes


def _duals(model_copy: ModelCopy, direction: Direction) -> dict[str, Tensor]:
    return {
        name: forward_ad.make_dual(
            model_copy.parameters[name].detach().requires_grad_(), tangent
        )
        for name, tangent in direction.items()
    }


def _value(
    model_copy: ModelCopy,
    part: Call,
    duals: Mapping[str, Tensor],
    loss: Loss,
    report: Report,
) -> Tensor:
    try:
        with observed(model_copy.body, report):
            return loss(model_copy(duals, part.args, part.kwargs), part.target)
    except NotImplementedError as error:
        raise InputError(
            "an operation of this model cannot be differentiated forward: "
            f"{str(error).splitlines()[0]} A mixture of experts from transformers "
            'needs experts_implementation="eager"'
        ) from error


def _plain(cotangent: Tensor) -> Tensor:
    """Return a gradient without the tangent that flows back beside it."""
    plain: Tensor = forward_ad.unpack_dual(cotangent).primal.detach()
    return plain


def _tangent(slope: Tensor | None, like: Tensor) -> Tensor:
    found = None if slope is None else forward_ad.unpack_dual(slope).tangent
    return torch.zeros_like(like) if found is None else found.detach().clone()


LARGEST = 4096


def node_hessians(
    model: nn.Module,
    batch: Any,
    **options: Unpack[Options],
) -> dict[tuple[str, str], Tensor]:
    """Return Jᵀ∇²⟨λ, φ⟩J by (site, kind): matrices N × N whose sum is the Hessian.

    One pass forward and back per parameter: for networks that fit on a page.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> node_hessians(model, (x, torch.zeros(2, 1)))["", "loss"]
        tensor([[1., 0.],
                [0., 1.]])
    """
    model_copy, parts, value = prepared(model, batch, options)
    at = {name: model_copy.parameters[name] for name in model_copy.trainable}
    count = sum(p.numel() for p in at.values())
    if count > LARGEST:
        raise InputError(
            f"{count} parameters: matrices are for at most {LARGEST}; use attributed"
        )
    total: dict[tuple[str, str], Tensor] = {}
    for part in parts:
        for name, matrix in _call_hessians(model_copy, part, at, value).items():
            total[name] = total[name] + matrix if name in total else matrix
    return total


def _call_hessians(
    model_copy: ModelCopy, part: Call, at: dict[str, Tensor], loss: Loss
) -> dict[tuple[str, str], Tensor]:
    cotangents = _cotangents(model_copy, part, at, loss)
    jacobian: dict[int, list[Tensor]] = defaultdict(list)
    products: dict[int, list[Tensor]] = defaultdict(list)
    for direction in _basis(at):
        nodes = moved(model_copy, part, direction, loss)
        for index, cotangent in cotangents.items():
            call = nodes[index].call
            jacobian[index].append(_flat(call.tangents))
            products[index].append(_flat(rule_of(call)(call, cotangent)))
    found: dict[tuple[str, str], Tensor] = {}
    for index, j_NZ in jacobian.items():
        name = nodes[index].site, nodes[index].kind
        h_NN = torch.stack(j_NZ) @ torch.stack(products[index]).mT
        found[name] = found[name] + h_NN if name in found else h_NN
    return found


def _cotangents(
    model_copy: ModelCopy, part: Call, at: dict[str, Tensor], loss: Loss
) -> dict[int, Tensor]:
    """Return the cotangent of each node, by its place in the forward pass."""
    still = {name: torch.zeros_like(p) for name, p in at.items()}
    found: dict[int, Tensor] = {}

    def keep(node: Node, cotangent: Tensor) -> None:
        found[node.index] = cotangent

    differentiated(model_copy, part, still, loss, keep)
    return dict(sorted(found.items()))


def _basis(at: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each unit vector; the others are zero and move all the same."""
    zeros = {name: torch.zeros_like(p) for name, p in at.items()}
    for name, zero in zeros.items():
        for index in range(zero.numel()):
            one = torch.zeros_like(zero)
            one.view(-1)[index] = 1
            yield {**zeros, name: one}


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvatureShare:
    """What the operations of one kind in one module add to vᵀHv."""

    site: str
    """Module name as in ``named_modules()``; "" is outside every module."""
    kind: str
    """norm, scores, softmax, mix, projection, product, activation, loss, or a name."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """vᵀHv, and the terms it is the sum of."""

    shares: tuple[CurvatureShare, ...]
    total: float
    """vᵀHv from the Hessian product itself."""
    residual: float
    """\\|Σ shares − total\\|: rounding, unless an operation was missed."""

    def grouped(self, name: Callable[[CurvatureShare], str]) -> dict[str, float]:
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
    **options: Unpack[Options],
) -> Attribution:
    """Return vᵀHv of a model's mean loss along a direction, term by term.

    Args:
        model: Any PyTorch model; a copy with the same weights is differentiated.
        batch, options: As for :func:`..curvature.hessian`.
        direction: The tangent of each parameter that moves.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> v = {"weight": torch.ones(1, 2)}
        >>> found = attributed(model, (x, torch.zeros(2, 1)), v)
        >>> found.total, [(s.kind, s.value) for s in found.shares]
        (2.0, [('loss', 2.0)])
    """
    model_copy, parts, loss = prepared(model, batch, options)
    direction = _matched(model_copy, direction)
    sums: dict[tuple[str, str], float] = defaultdict(float)

    def on_cotangent(node: Node, cotangent: Tensor) -> None:
        products = rule_of(node.call)(node.call, cotangent)
        for product, tangent in zip(products, node.call.tangents, strict=True):
            sums[node.site, node.kind] += _dot(product, tangent)

    total = 0.0
    for part in parts:
        products = differentiated(model_copy, part, direction, loss, on_cotangent)
        total += sum(_dot(products[name], v) for name, v in direction.items())
    # Cotangents arrive from the end of the network; readers begin at its beginning.
    return _attribution(dict(reversed(sums.items())), total)


def _attribution(sums: Mapping[tuple[str, str], float], total: float) -> Attribution:
    shares = (CurvatureShare(site=s, kind=k, value=v) for (s, k), v in sums.items())
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
    **options: Unpack[Options],
) -> Attribution:
    """Return tr H term by term: the mean of zᵀHz over random signs z (Hutchinson)."""
    if probes < 1:
        raise InputError(f"probes {probes}: at least one is needed")
    moving = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return combined(
        attributed(model, batch, _signs(moving, generator), **options)
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


def _matched(model_copy: ModelCopy, direction: Direction) -> dict[str, Tensor]:
    for name, tangent in direction.items():
        if name not in model_copy.parameters:
            raise InputError(f"direction names {name!r}, which is no parameter")
        if tangent.shape != model_copy.parameters[name].shape:
            got, wanted = tuple(tangent.shape), tuple(model_copy.parameters[name].shape)
            raise InputError(f"direction of {name!r} is {got}; the parameter {wanted}")
    return {n: v.detach().to(model_copy.parameters[n]) for n, v in direction.items()}


def _dot(a: Tensor, b: Tensor) -> float:
    """Return ⟨a, b⟩ summed in float64: terms cancel."""
    return float((a.double() * b.double()).sum())
