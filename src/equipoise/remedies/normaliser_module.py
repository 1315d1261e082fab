"""A normaliser as an ``nn.Module``, so that its parameters can be learnt and saved.

Axes, in this file:  B batch · H head · Q query · K key.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS, Normaliser, attention_weights
from equipoise.numerics.normalisers.exponential import (
    ADAPTIVE,
    AdaptiveTemperature,
    ScalableSoftmax,
    SinkSoftmax,
)
from equipoise.numerics.normalisers.sparse import LEAST_ALPHA, Entmax, ScalableEntmax


@dataclass(frozen=True, slots=True)
class Learnable:
    """Where each parameter of a head starts, and the normaliser they make."""

    start: Mapping[str, float]
    made: Callable[[Mapping[str, Tensor]], Normaliser]


def _alpha(raw_H: Tensor) -> Tensor:
    """Return α between 1.01 and 2, whatever the optimiser does; 1.505 at 0."""
    return LEAST_ALPHA + (2 - LEAST_ALPHA) * torch.sigmoid(raw_H)


_POWERS = [f"c{power}" for power in reversed(range(len(ADAPTIVE)))]
_SOFTPLUS_OF_ONE = math.log(math.expm1(1.0))

LEARNABLE: dict[str, Learnable] = {
    "ssmax": Learnable({"s": 0.43}, lambda p: ScalableSoftmax(p["s"][:, None, None])),
    "entmax": Learnable(
        {"raw_alpha": 0.0}, lambda p: Entmax(_alpha(p["raw_alpha"])[:, None])
    ),
    # β = softplus and γ = 2 tanh as in the paper, but one per head, not per query: the
    # hidden state they would be projected from is not at hand where weights are made.
    "asentmax": Learnable(
        {"raw_beta": _SOFTPLUS_OF_ONE, "raw_gamma": math.atanh(0.5)},
        lambda p: ScalableEntmax(
            beta=nn.functional.softplus(p["raw_beta"])[:, None, None],
            gamma=2 * torch.tanh(p["raw_gamma"])[:, None, None],
        ),
    ),
    "sink": Learnable({"b": 0.0}, lambda p: SinkSoftmax(p["b"][:, None], name="sink")),
    "adaptive-temperature": Learnable(
        dict(zip(_POWERS, ADAPTIVE, strict=True)),
        lambda p: AdaptiveTemperature(tuple(p[c][:, None, None] for c in _POWERS)),
    ),
}
"""What can be learnt, by the normaliser's name."""


class NormaliserModule(nn.Module):
    """Scores in (scaled, hidden keys at -inf), attention weights out.

    >>> NormaliserModule("sparsemax")(torch.tensor([2.0, 0.0, -torch.inf]))
    tensor([1., 0., 0.])
    >>> [name for name, _ in NormaliserModule("sink", heads=4).named_parameters()]
    ['b']
    """

    def __init__(self, name: str, *, heads: int | None = None) -> None:
        """Make one with its default parameters or, given ``heads``, learnt per head."""
        super().__init__()
        if name not in NORMALISERS:
            known = ", ".join(sorted(NORMALISERS))
            raise InputError(f"no normaliser {name!r}; there are {known}")
        if heads is not None and name not in LEARNABLE:
            raise InputError(
                f"{name} has nothing to learn; {', '.join(LEARNABLE)} have"
            )
        self.name, self.heads = name, heads
        self.fixed = NORMALISERS[name]() if heads is None else None
        if heads is not None:
            for key, value in LEARNABLE[name].start.items():
                start_H = torch.full((heads,), value)
                self.register_parameter(key, nn.Parameter(start_H))

    @property
    def normaliser(self) -> Normaliser:
        """Return the normaliser as its parameters stand now."""
        if self.fixed is not None:
            return self.fixed
        return LEARNABLE[self.name].made(dict(self.named_parameters()))

    def forward(self, z_BHQK: Tensor) -> Tensor:
        if self.heads is None:
            return attention_weights(self.normaliser, z_BHQK)
        # torch's own attention folds heads into the batch: (B·H, Q, K).
        folded = z_BHQK.ndim == 3 and z_BHQK.shape[0] % self.heads == 0
        z_BHQK = z_BHQK.unflatten(0, (-1, self.heads)) if folded else z_BHQK
        if z_BHQK.ndim < 3 or z_BHQK.shape[-3] != self.heads:
            raise InputError(
                f"{self.name} learns for {self.heads} heads, but the scores are "
                f"{tuple(z_BHQK.shape)}: give (batch, head, query, key)"
            )
        w_BHQK = attention_weights(self.normaliser, z_BHQK)
        return w_BHQK.flatten(0, 1) if folded else w_BHQK

    def extra_repr(self) -> str:
        return self.name if self.heads is None else f"{self.name}, heads={self.heads}"
