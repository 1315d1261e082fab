"""How large hidden states are where they enter a block, and where attention.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import listening
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.norms import block_norm
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit


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
        for site, block in anatomy.blocks.items():
            yield _listening(block, partial(_emit_B, emit, site, "residual.B"), guarded)
        for found in anatomy.attention:
            listen = partial(_emit_B, emit, found.name, "attention.B")
            yield _listening(found.module, listen, guarded)


def _listening(module: nn.Module, listen: Any, guarded: Guarded) -> RemovableHandle:
    return listening.before(module, guarded(listen))


def _emit_B(
    emit: Emit,
    site: str,
    quantity: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    x_BTD = hidden_states(args, kwargs)
    if x_BTD is not None:
        B = block_norm(x_BTD).amax() * x_BTD.shape[-1] ** 0.5
        emit(site, quantity, B, how="max")


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first floating tensor with a token axis among a call's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None
