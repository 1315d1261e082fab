"""Gradient norms per layer, read when backward is over and nobody has clipped."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.names import named
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.shards import share


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Emit ‖∂loss/∂w‖₂ over the parameters of each block, and over the rest apart.

    Post-accumulate hooks would see a rank's own gradient before DDP averages it and
    FSDP shards it, and an optimiser's hook sees it clipped. Between the two, when
    ``backward()`` returns, it is whole, reduced and untouched. The last micro-batch's
    reading stays, because ``grad`` holds the sum by then.
    """

    name: str = "gradients"
    ranks: int = 1
    """Over how many ranks the parts will be put together."""

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from ()

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        parts: dict[str, list[Tensor]] = {}
        for site, parameter in owned_parameters(anatomy):
            if parameter.grad is not None:
                parts.setdefault(site, []).append(share(parameter.grad, self.ranks))
        for site, norms in parts.items():
            norm = torch.linalg.vector_norm(torch.stack(norms))
            emit(
                site,
                "gradient.norm",
                norm if scale is None else norm / scale,
                how="norm",
            )


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
