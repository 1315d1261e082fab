"""How large hidden states are where they enter a block, and where attention.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.visits import token_sizes
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.inputs import at_inputs


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Emit B̄ = max ‖x‖₂ over tokens, of the residual stream and of attention's input.

    The paper's Theorem 5.1 uses the input of attention, its appendix E the residual
    stream; in a pre-LN model only the second grows. Both, under their own names.
    """

    name: str = "magnitudes"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        callers = {site.name: site.module for site in anatomy.attention}
        yield from at_inputs(anatomy.blocks, partial(_B, emit, "residual.B"), guarded)
        yield from at_inputs(callers, partial(_B, emit, "attention.B"), guarded)


def _B(emit: Emit, quantity: str, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    B = token_sizes(x_BTD).around_zero.amax() * x_BTD.shape[-1] ** 0.5
    emit(site, quantity, B, how="max")
