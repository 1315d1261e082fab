"""The shape of the residual stream: heavy tails, and tokens that become alike.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.shards import WHOLE, head_split
from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.visits import kurtosis, token_cosine
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.inputs import at_inputs

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
