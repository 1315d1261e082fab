"""Gradient norms per layer, read after backward and before clipping."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.anatomy.sharding import local_part, piece, sharded_axes, summand
from equipoise.anatomy.sites import Anatomy, Reason, Weight, named
from equipoise.probes.protocols import Emit
from equipoise.probes.sharding import (
    Parts,
    PartsProbe,
    is_partial,
    names,
    parts_by_rank,
    share,
    shares,
)

LARGEST_SUMMAND = 1 << 16
"""Numbers of one parameter whose gradient the ranks add up in their exchange."""
SUMMED = Reason("gradient_summed", hides=("gradient.norm",))
NORM, QK = "gradient.norm", "gradient.qk"
CUT = Reason("gradient_split", hides=("gradient.qk",))


@dataclass(slots=True)
class GradientNorms(PartsProbe):
    """Emit ‖∂loss/∂w‖₂ over the parameters of each block, and over the rest apart.

    Of each attention site also that of its maps to queries and keys together.

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
        self._queries_and_keys(anatomy, emit, scale)
        parts: dict[str, list[Tensor]] = {}
        """Site → the gradients of which this rank holds its share."""
        incomplete: set[str] = set()
        for number, (site, parameter) in enumerate(owned_parameters(anatomy)):
            if parameter.grad is None:
                continue
            grads = parts.setdefault(site, [])
            if not is_partial(parameter.grad):
                grads.append(parameter.grad)
            elif not self._summed(f"{site}|{number}", parameter.grad, scale):
                emit.not_read(site, SUMMED)
                incomplete.add(site)
        for site, grads in parts.items():
            if grads and site not in incomplete:
                norm = torch.linalg.vector_norm(torch.stack(shares(grads, self.ranks)))
                emit(site, NORM, norm if scale is None else norm / scale, how="norm")

    def _queries_and_keys(
        self, anatomy: Anatomy, emit: Emit, scale: Tensor | None
    ) -> None:
        for site in anatomy.attention:
            if site.projections is None:
                continue
            pair = site.projections.q, site.projections.k
            found = [_norms(weight, self.ranks) for weight in pair]
            if None in found:
                emit.not_read(site.name, CUT)
                continue
            norms = [norm for some in found for norm in some or ()]
            if norms:
                norm = torch.linalg.vector_norm(torch.stack(norms))
                norm = norm if scale is None else norm / scale
                emit(site.name, QK, norm, how="norm")

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


def _norms(weight: Weight, ranks: int) -> list[Tensor] | None:
    """Return this rank's shares of a map's gradient; None where its rows are cut.

    A map under LoRA counts with its adapters, a pruned one with what is left of it.
    Frozen weights have no gradient.
    """
    adapted = weight.rows is None and hasattr(weight.module, "base_layer")
    held = getattr(weight.module, weight.attribute, None)
    if not isinstance(held, nn.Parameter):
        held = weight.module._parameters.get(f"{weight.attribute}_orig")
    own = weight.module.parameters() if adapted else [held]
    grads = [p.grad for p in own if p is not None and p.grad is not None]
    if any(map(is_partial, grads)):
        return None
    if weight.rows is None:
        return shares(grads, ranks)
    out = int(weight.transposed)
    if any(grad.ndim != 2 or out in sharded_axes(grad) for grad in grads):
        return None
    return [share(weight.part_of(local_part(g)), ranks, like=g) for g in grads]


def owned_parameters(anatomy: Anatomy) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, with the block it belongs to, or its own module."""
    seen: set[int] = set()
    for name, module in named(anatomy.model):
        site = _block(name, anatomy.blocks) if module._parameters else ""
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield site, parameter


def _block(name: str, blocks: Container[str]) -> str:
    """Return the outermost block that a module lies in, or its own name."""
    end = name.find(".")
    while end >= 0:
        if name[:end] in blocks:
            return name[:end]
        end = name.find(".", end + 1)
    return name
