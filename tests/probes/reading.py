"""Read a small model once with probes attached, and keep what they emitted."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.probes.capture import Boundary, attached
from equipoise.probes.protocols import GradientProbe, Probe
from tests.models import GPT, GPTConfig

Emitted = dict[tuple[str, str], Tensor]
"""(site, quantity) → values."""
TINY = GPTConfig(width=16, depth=3, heads=2, context=12, vocabulary=11)


class Emitter:
    """Keeps every value a probe emits, and every reason why something is not read."""

    def __init__(self) -> None:
        self.found: Emitted = {}
        self.reasons: dict[str, list[Reason]] = {}

    def __call__(
        self, site: str, quantity: str, values: Tensor, *, how: str = "last"
    ) -> None:
        self.found[site, quantity] = values.detach().clone()

    def not_read(self, site: str, why: Reason) -> None:
        self.reasons.setdefault(site, []).append(why)


def gpt(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT(replace(TINY, **changes))  # type: ignore[arg-type]


def tokens(seed: int = 1, rows: int = 2, length: int = 12) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (rows, length), generator=rng)


def measured(
    model: nn.Module, probes: Sequence[Probe], *inputs: Tensor, **changes: object
) -> Emitted:
    """Return (site, quantity) → values of one forward and backward pass."""
    emit = Emitter()
    anatomy: Anatomy = replace(anatomy_of(model), **changes)  # type: ignore[arg-type]
    with attached(probes, anatomy, emit, boundary=Boundary(strict=True)):
        output = model(*(inputs or (tokens(),)))
        output.square().mean().backward()
    for probe in probes:
        if isinstance(probe, GradientProbe):
            probe.on_gradients(anatomy, emit, scale=None)
    return emit.found
