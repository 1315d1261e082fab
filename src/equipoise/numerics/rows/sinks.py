"""Rows with learned sinks: columns of scores that take mass and carry no value.

A sink is not a key. Its logit is a parameter, not a product of the row's query, so the
row's sensitivity is that of the keys' masses p to the keys' scores, beside a mass 1 - M
that stays where it is:

    θ = M - min_S (2 p(S) - M)² = M - M²(1 - θ'),   M = Σ p over keys,

with θ' of the keys alone, p/M. Proof: for x = ±1 with + on S the derivative is
pᵢ(xᵢ - x̄), x̄ = Σ pⱼxⱼ = 2p(S) - M, and Σ pᵢ|xᵢ - x̄| = M - x̄². Reading the sink as a
key would count its own derivative too: up to twice the truth.

Axes, in this file:  x any leading axes · K column, keys first, then sinks · C column of
``row_columns``.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.rows.statistics import (
    COLUMNS,
    LOWER,
    MASSES,
    MAX_LOGIT,
    SINK,
    TOP_MASS,
    UPPER,
    VISIBLE,
    row_columns,
)

KEY_MASS, SINK_LOGIT = COLUMNS, COLUMNS + 1
"""Two columns more than ``row_columns`` has, where there are sinks."""


def key_columns(
    scores: Float[Tensor, "*x K"], *, sinks: int, causal_from: int | None = None
) -> Float[Tensor, "C *x"]:
    """Return ``row_columns`` of the keys; beside sinks, with two columns more.

    θ, the mass of the first key and the largest mass are shares of the whole row,
    sinks included; entropy, logits and counts are those of the keys alone. The columns
    added are the mass of all keys and the sinks' logit (of several: their logsumexp).

    Example:
        >>> read = key_columns(torch.zeros(1, 4), sinks=1)
        >>> read[KEY_MASS], read[LOWER].mul(16).round() / 16
        (tensor([0.7500]), tensor([0.6875]))
    """
    keys = scores.shape[-1] - sinks
    read_Cx = row_columns(scores[..., :keys], causal_from=causal_from)
    if not sinks:
        return read_Cx
    # In float64: the difference of two large logits must keep its digits.
    return _beside(read_Cx, scores[..., keys:].double().logsumexp(-1))


def _beside(read_Cx: Tensor, sink_x: Tensor) -> Tensor:
    seen_x = read_Cx[VISIBLE] > 0
    wide_Cx = read_Cx.double()
    above_x = wide_Cx[MAX_LOGIT] - wide_Cx[TOP_MASS].log() - sink_x
    mass_x, rest_x = above_x.sigmoid(), (-above_x).sigmoid()
    out_Cx = torch.cat((wide_Cx, mass_x.where(seen_x, 0.0)[None], sink_x[None]))
    # A row with one key has no θ, by the convention of ``row_statistics``.
    selects_x = read_Cx[VISIBLE] >= 2
    for bound in (LOWER, UPPER):
        # M - M²(1 - θ') without its cancellation, where M is near 1 and θ' near 0.
        theta_x = mass_x * rest_x + mass_x.square() * wide_Cx[bound]
        broken_x = wide_Cx[bound].isnan()
        out_Cx[bound] = theta_x.where(selects_x | broken_x, 0.0)
    for column, factor_x in ((SINK, mass_x), (TOP_MASS, mass_x), (MASSES, mass_x**2)):
        out_Cx[column] = (factor_x * wide_Cx[column]).where(seen_x, 0.0)
    return out_Cx.to(read_Cx.dtype)
