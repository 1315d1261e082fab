"""Gradient norms per layer, read before clipping as each gradient is accumulated."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.names import named
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit


@dataclass(slots=True)
class GradientNorms:
    """Emit ‖∂loss/∂w‖₂ over the parameters of each block, and over the rest apart.

    An optimiser hook sees gradients only after clipping; a post-accumulate hook sees
    them as the backward pass leaves them. The last micro-batch's call wins, because
    ``grad`` holds the sum by then.
    """

    name: str = "gradients"
    _squares: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._squares = {}
        for site, parameter in owned_parameters(anatomy):
            if parameter.requires_grad:
                listen = guarded(partial(self._listen, site, emit), backward=True)
                yield parameter.register_post_accumulate_grad_hook(listen)

    def _listen(self, site: str, emit: Emit, parameter: Tensor) -> None:
        assert parameter.grad is not None
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) ** 2
        mine = self._squares.setdefault(site, {})
        mine[id(parameter)] = square
        emit(site, "gradient.norm", torch.stack(list(mine.values())).sum().sqrt())


def owned_parameters(anatomy: Anatomy) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, with the block it belongs to, or its own module."""
    seen: set[int] = set()
    blocks = list(anatomy.blocks)
    for name, module in named(anatomy.model):
        site = next((b for b in blocks if f"{name}.".startswith(f"{b}.")), name)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield site, parameter
