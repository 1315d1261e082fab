"""The shape of the residual stream: heavy tails, and tokens that become alike.

Axes, in this file:  B batch · T token · D width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy.sites import Anatomy
from equipoise.numerics.visits import kurtosis
from equipoise.probes.capture import Guarded
from equipoise.probes.emission import Emit
from equipoise.probes.inputs import at_inputs


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Emit the kurtosis of the stream's entries and the mean cosine of its tokens.

    A cosine near 1 means that the tokens of a sequence have collapsed onto one
    direction: attention then has nothing to select, and Q and K get no gradient.
    """

    name: str = "stream"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from at_inputs(anatomy.blocks, partial(_listen, emit), guarded)


def _listen(emit: Emit, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    emit(site, "residual.kurtosis", kurtosis(x_BTD), how="mean")
    if x_BTD.ndim == 3 and x_BTD.shape[1] > 1:
        emit(site, "residual.token_cosine", token_cosine(x_BTD).mean(), how="mean")


def token_cosine(x_BTD: Tensor) -> Tensor:
    """Return per sequence the mean cosine over pairs of different tokens.

    Σ_{i≠j} x̂_i·x̂_j = ‖Σ x̂_i‖² − Σ‖x̂_i‖², so no T × T matrix is formed.

    Example:
        >>> token_cosine(torch.ones(1, 5, 3)).round(decimals=6)
        tensor([1.])
    """
    unit_BTD = torch.nn.functional.normalize(x_BTD, dim=-1)
    T = x_BTD.shape[1]
    together = unit_BTD.sum(1).square().sum(-1)
    alone = unit_BTD.square().sum((1, 2))
    return (together - alone) / (T * (T - 1))
