"""What every normaliser offers: weights, a Jacobian in low-rank form, constants.

Axes, in this file:  x any leading axes · K key · R low-rank term.
Scores include the model's scale; temperature τ divides them. n is the number of visible
keys of a row. A fully hidden row has no weights: it gives zeros, never NaN.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.numerics.normalisers.backward import Floored, Scaled, lowest


@dataclass(frozen=True, slots=True)
class Rows:
    """Scores made safe to compute with, and which keys and rows count."""

    z_xK: Float[Tensor, "*x K"]
    """Scores over τ, at least float32; hidden keys hold a finite, very low number."""
    visible_x1: Float[Tensor, "*x 1"] | None = None
    """How many keys each row sees, where the scores do not show it."""

    @property
    def hidden_xK(self) -> Bool[Tensor, "*x K"]:
        return self.z_xK <= lowest(self.z_xK.dtype)

    @property
    def seen_xK(self) -> Bool[Tensor, "*x K"]:
        """NaN is seen."""
        return ~self.hidden_xK

    @property
    def n_x1(self) -> Float[Tensor, "*x 1"]:
        """How many keys each row sees."""
        if self.visible_x1 is not None:
            return self.visible_x1
        # Counted as a norm: torch sums booleans through 64-bit integers.
        K = self.z_xK.shape[-1]
        hidden_xK = self.hidden_xK.to(self.z_xK.dtype)
        return K - hidden_xK.sum(-1, keepdim=True)

    def scaled(self, factor: Tensor) -> Tensor:
        """Return factor·z, hidden keys still hidden: a factor may well be 0."""
        z_xK: Tensor = Scaled.apply(self.z_xK, factor)  # type: ignore[no-untyped-call]
        return z_xK

    def only_seen(self, w_xK: Tensor) -> Tensor:
        """Return the weights with exact zeros on hidden keys."""
        return w_xK.masked_fill(self.hidden_xK, 0.0)

    def lit(self, w_xK: Tensor) -> Tensor:
        """Return weights whose hidden keys are 0 already, fully hidden rows too.

        An exponential of a hidden key is 0 beside any visible one; only where all are
        hidden do the weights need a second look, which most batches never take.
        """
        dark_x1 = self.z_xK.amax(-1, keepdim=True) <= lowest(self.z_xK.dtype)
        return w_xK.masked_fill(dark_x1, 0.0) if bool(dark_x1.any()) else w_xK


def rows(
    scores: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    visible: Tensor | None = None,
) -> Rows:
    """Return scores/τ with hidden keys (mask False, or -inf) set to a finite low.

    Finite, because -inf times a zero weight is NaN in the backward pass. 16-bit scores
    are computed in float32: thresholds fail in bfloat16.
    """
    z = scores.to(torch.promote_types(scores.dtype, torch.float32))
    z = z if temperature == 1.0 else z / temperature
    z = z if mask is None else z.masked_fill(~mask, -math.inf)
    n = None if visible is None else visible.unsqueeze(-1).to(z.dtype)
    return Rows(Floored.apply(z), n)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A Jacobian diag(d) − Σ_r u_r v_rᵀ with respect to the scores, row by row."""

    d_xK: Tensor
    u_RxK: Tensor
    v_RxK: Tensor

    def apply(self, tangent_xK: Float[Tensor, "*x K"]) -> Float[Tensor, "*x K"]:
        """Return J·t without forming J."""
        inner_Rx1 = (self.v_RxK * tangent_xK).sum(-1, keepdim=True)
        return self.d_xK * tangent_xK - (self.u_RxK * inner_Rx1).sum(0)

    def dense(self) -> Float[Tensor, "*x K K"]:
        """Return J itself; for tests and small rows."""
        outer = torch.einsum("r...i,r...j->...ij", self.u_RxK, self.v_RxK)
        return torch.diag_embed(self.d_xK) - outer


def covariance(g_xK: Tensor, *, total: Tensor | None = None) -> LowRank:
    """Return diag(g) − g gᵀ/G, G = Σg unless another total is given."""
    total = g_xK.sum(-1, keepdim=True) if total is None else total
    share = torch.where(total > 0, g_xK / total, torch.zeros_like(g_xK))
    return LowRank(g_xK, g_xK.unsqueeze(0), share.unsqueeze(0))


def scaled(jacobian: LowRank, factor: Tensor | float) -> LowRank:
    """Return the Jacobian times a factor per row."""
    return LowRank(jacobian.d_xK * factor, jacobian.u_RxK * factor, jacobian.v_RxK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lipschitz:
    """The largest Jacobian norms over all rows of n keys, at temperature 1."""

    two: float
    """2→2."""
    infinity_to_one: float
    """∞→1: θ's counterpart."""
    attained: bool = True
    """The suprema themselves; otherwise proven upper bounds."""


class Interval(NamedTuple):
    """Bounds of a norm, row by row: attained by some signs, and proven for all."""

    lower: Float[Tensor, "*x"]
    upper: Float[Tensor, "*x"]


@runtime_checkable
class Normaliser(Protocol):
    """A map from scores to attention weights; its parameters are its fields."""

    @property
    def name(self) -> str: ...

    @property
    def sums_to_one(self) -> bool: ...

    def weights(self, given: Rows) -> Tensor:
        """Return the weights of prepared rows; differentiable."""
        ...

    def jacobian(self, given: Rows) -> LowRank:
        """Return ∂weights/∂z at these rows, z = scores/τ."""
        ...

    def theta(self, given: Rows) -> Interval:
        """Return ‖∂weights/∂z‖_{∞→1} of every row: θ(p) for softmax, in float64."""
        ...

    def lipschitz(self, n: int) -> Lipschitz:
        """Return the largest norms of that Jacobian over rows of n visible keys."""
        ...


def attention_weights(
    normaliser: Normaliser,
    scores: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    visible: Tensor | None = None,
) -> Float[Tensor, "*x K"]:
    """Return the weights of scores under a normaliser, in the dtype of the scores.

    Args:
        normaliser: Softmax or a rival.
        scores: Include the model's scale; -inf hides a key.
        mask: True where a key is visible.
        temperature: τ, which divides the scores.
        visible: How many keys each row sees, when that is not what the mask shows.
    """
    given = rows(scores, mask=mask, temperature=temperature, visible=visible)
    return normaliser.weights(given).to(scores.dtype)


def jvp(
    normaliser: Normaliser,
    scores: Float[Tensor, "*x K"],
    tangent: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "*x K"]:
    """Return J·t at the scores in closed form, 1/τ included; hidden keys get 0."""
    given = rows(scores, mask=mask, temperature=temperature)
    tangent = given.only_seen(tangent.to(given.z_xK.dtype))
    return normaliser.jacobian(given).apply(tangent) / temperature
