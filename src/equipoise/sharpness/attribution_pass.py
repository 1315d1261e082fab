"""Forward with tangents, and back with cotangents: what a node needs of a network."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise.anatomy.twin import Twin
from equipoise.errors import InputError
from equipoise.sharpness.attribution_nodes import Met, Node, overheard
from equipoise.sharpness.objective import Call, Loss

Direction = Mapping[str, Tensor]
"""Parameter name → tangent. A parameter that is absent does not move."""
Heard = Callable[[Node, Tensor], None]
"""Takes a node and the cotangent at its result, on the way back."""


def differentiated(
    twin: Twin, part: Call, direction: Direction, loss: Loss, heard: Heard
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


def moved(twin: Twin, part: Call, direction: Direction, loss: Loss) -> list[Node]:
    """Return every node of a pass with its tangents, without going back."""
    nodes: list[Node] = []
    with forward_ad.dual_level(), torch.no_grad():
        duals = _duals(twin, direction)
        _value(twin, part, duals, loss, lambda node, _: nodes.append(node))
    return nodes


def _duals(twin: Twin, direction: Direction) -> dict[str, Tensor]:
    return {
        name: forward_ad.make_dual(
            twin.parameters[name].detach().requires_grad_(), tangent
        )
        for name, tangent in direction.items()
    }


def _value(
    twin: Twin, part: Call, duals: Mapping[str, Tensor], loss: Loss, met: Met
) -> Tensor:
    try:
        with overheard(twin.body, met):
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
