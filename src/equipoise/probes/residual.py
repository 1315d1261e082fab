"""How large hidden states are where they enter a block, and where attention.

Axes, in this file:  B batch · T token · D width.

The shape of the residual stream: heavy tails, and tokens that become alike.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import WHOLE, head_split
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.token_statistics import kurtosis, token_cosine, token_sizes
from equipoise.probes.capture import Emit, Guarded
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


SOME_TOKENS = (
    "each rank holds some tokens of every sequence (sequence parallelism): "
    "residual.token_cosine, residual.kurtosis and medians over tokens are means over "
    "what each rank has of its own"
)


@dataclass(slots=True)
class StreamShape:
    """Emit the kurtosis of the stream's entries and the mean cosine of its tokens.

    A cosine near 1 means that the tokens of a sequence have collapsed onto one
    direction: attention then has nothing to select, and Q and K get no gradient.
    """

    name: str = "stream"
    _anatomy: Anatomy | None = None
    _tokens: dict[str, int] = field(default_factory=dict)
    """Block → how many tokens of a sequence entered it on this rank."""

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy, self._tokens = anatomy, {}
        listen = partial(_listen, emit, self._tokens)
        yield from at_inputs(anatomy.blocks, listen, guarded)

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        """Attention that sees more tokens than came in got them from other ranks."""
        for block, tokens in self._tokens.items():
            within = site.startswith(f"{block}.") and call.shape[2] > tokens
            if within and head_split(call.module) != WHOLE:
                assert self._anatomy is not None
                self._anatomy.lacks(block, SOME_TOKENS)


def _listen(
    emit: Emit, tokens: dict[str, int], site: str, module: nn.Module, x_BTD: Tensor
) -> None:
    tokens[site] = x_BTD.shape[-2]
    x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    emit(site, "residual.kurtosis", kurtosis(x_BTD), how="mean")
    if x_BTD.ndim == 3 and x_BTD.shape[1] > 1:
        emit(site, "residual.token_cosine", token_cosine(x_BTD).mean(), how="mean")
