"""Forward with tangents, and back with cotangents: what a node needs of a network.

The Hessian of a small network as whole matrices, one for each operation.

Axes, in this file:  N all parameters, flat, in the order of ``named_parameters`` ·
Z all numbers that one operation reads and that move.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.auditing.curvature.attribution_nodes import Met, Node, observed
from equipoise.auditing.curvature.attribution_rules import rule_of
from equipoise.auditing.curvature.objective import Call, Loss, calls, cast, mean_loss
from equipoise.errors import InputError

Direction = Mapping[str, Tensor]
"""Parameter name → tangent. A parameter that is absent does not move."""
Heard = Callable[[Node, Tensor], None]
"""Takes a node and the cotangent at its result, on the way back."""


def differentiated(
    twin: ModelCopy, part: Call, direction: Direction, loss: Loss, heard: Heard
) -> dict[str, Tensor]:
    """Run forward with tangents and back with cotangents; return Hv by parameter."""

    def met(node: Node, result: Tensor) -> None:
        def hook(cotangent: Tensor | None) -> None:
            # One of several results that the loss does not read has none.
            if cotangent is not None:
                heard(node, _plain(cotangent))

        if result.requires_grad:
            result.register_hook(hook)

    with forward_ad.dual_level(), torch.enable_grad():
        duals = _duals(twin, direction)
        value = _value(twin, part, duals, loss, met)
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


def moved(twin: ModelCopy, part: Call, direction: Direction, loss: Loss) -> list[Node]:
    """Return every node of a pass with its tangents, without going back."""
    nodes: list[Node] = []
    with forward_ad.dual_level(), torch.no_grad():
        duals = _duals(twin, direction)
        _value(twin, part, duals, loss, lambda node, _: nodes.append(node))
    return nodes


def _duals(twin: ModelCopy, direction: Direction) -> dict[str, Tensor]:
    return {
        name: forward_ad.make_dual(
            twin.parameters[name].detach().requires_grad_(), tangent
        )
        for name, tangent in direction.items()
    }


def _value(
    twin: ModelCopy, part: Call, duals: Mapping[str, Tensor], loss: Loss, met: Met
) -> Tensor:
    try:
        with observed(twin.body, met):
            return loss(twin(duals, part.args, part.kwargs), part.target)
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
    *,
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
) -> dict[tuple[str, str], Tensor]:
    """Return Jᵀ∇²⟨λ, φ⟩J by (site, kind): matrices N × N whose sum is the Hessian.

    One pass forward and back per parameter: for networks that fit on a page.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> node_hessians(model, (x, torch.zeros(2, 1)))["", "loss"]
        tensor([[1., 0.],
                [0., 1.]])
    """
    twin = ModelCopy(model, dtype=dtype)
    at = {name: twin.parameters[name] for name in twin.trainable}
    count = sum(p.numel() for p in at.values())
    if count > LARGEST:
        raise InputError(
            f"{count} parameters: matrices are for at most {LARGEST}; use attributed"
        )
    whole: dict[tuple[str, str], Tensor] = {}
    wide = next(iter(at.values())).dtype
    for part in cast(calls(model, batch), wide):
        for name, matrix in _of_call(twin, part, at, loss or mean_loss).items():
            whole[name] = whole[name] + matrix if name in whole else matrix
    return whole


def _of_call(
    twin: ModelCopy, part: Call, at: dict[str, Tensor], loss: Loss
) -> dict[tuple[str, str], Tensor]:
    cotangents = _cotangents(twin, part, at, loss)
    jacobian: dict[int, list[Tensor]] = defaultdict(list)
    products: dict[int, list[Tensor]] = defaultdict(list)
    for direction in _basis(at):
        nodes = moved(twin, part, direction, loss)
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
    twin: ModelCopy, part: Call, at: dict[str, Tensor], loss: Loss
) -> dict[int, Tensor]:
    """Return the cotangent of each node, by its place in the forward pass."""
    still = {name: torch.zeros_like(p) for name, p in at.items()}
    heard: dict[int, Tensor] = {}

    def keep(node: Node, cotangent: Tensor) -> None:
        heard[node.index] = cotangent

    differentiated(twin, part, still, loss, keep)
    return dict(sorted(heard.items()))


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
