"""Gradient norms per layer, read after backward and before clipping."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import local_part, piece, summand
from equipoise.anatomy.sites import Anatomy, named
from equipoise.probes.protocols import Emit
from equipoise.probes.sharding import (
    Parts,
    PartsProbe,
    is_partial,
    names,
    parts_by_rank,
    share,
)

LARGEST_SUMMAND = 1 << 16
"""Numbers of one parameter whose gradient the ranks add up in their exchange."""
SUMMED = (
    "its gradient is a sum over ranks that no rank holds (a parameter under sequence "
    "parallelism that is too large to exchange, or a rank that watches alone): "
    "gradient.norm is not read"
)
NORM = "gradient.norm"


@dataclass(slots=True)
class GradientNorms(PartsProbe):
    """Emit ‖∂loss/∂w‖₂ over the parameters of each block, and over the rest apart.

    Post-accumulate hooks would see a rank's own gradient before DDP averages it and
    FSDP shards it, and an optimiser's hook sees it clipped. Between the two, when
    ``backward()`` returns, it is complete and reduced. The last micro-batch's
    reading stays, because ``grad`` holds the sum by then. Under sequence parallelism a
    norm's gradient is the sum of what the ranks hold: it travels, being small.
    """

    name: str = "gradients"
    ranks: int = 1
    """Over how many ranks the parts will be put together."""

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        parts: dict[str, list[Tensor]] = {}
        incomplete: set[str] = set()
        for number, (site, parameter) in enumerate(owned_parameters(anatomy)):
            if parameter.grad is None:
                continue
            norms = parts.setdefault(site, [])
            if not is_partial(parameter.grad):
                norms.append(share(parameter.grad, self.ranks))
            elif not self._summed(f"{site}|{number}", parameter.grad, scale):
                emit.not_read(site, SUMMED)
                incomplete.add(site)
        for site, norms in parts.items():
            if norms and site not in incomplete:
                norm = torch.linalg.vector_norm(torch.stack(norms))
                emit(site, NORM, norm if scale is None else norm / scale, how="norm")

    def _summed(self, name: str, gradient: Tensor, scale: Tensor | None) -> bool:
        """Keep this rank's summand for the exchange, if there is one."""
        part, place = local_part(gradient.detach()), piece(gradient)
        if self.ranks == 1 or part.numel() > LARGEST_SUMMAND:
            return False
        part = part.float().clone() if scale is None else part.float() / scale
        self._parts.add(f"{name}|{place.part}", part, summand(gradient))
        return True

    def on_parts(self, ranks: Sequence[Parts], emit: Emit) -> None:
        norms: dict[str, list[Tensor]] = {}
        for name in names(ranks):
            for summands in parts_by_rank(ranks, name)[:1]:
                norm = torch.linalg.vector_norm(torch.stack(summands).sum(0))
                norms.setdefault(name.split("|")[0], []).append(norm)
        for site, found in norms.items():
            norm = torch.linalg.vector_norm(torch.stack(found))
            emit(site, NORM, norm, how="norm")


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
