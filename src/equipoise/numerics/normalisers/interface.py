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


@dataclass(frozen=True, slots=True)
class Rows:
    """Scores made safe to compute with, and which keys and rows count."""

    z_xK: Float[Tensor, "*x K"]
    """Scores over τ, at least float32; hidden keys hold a finite, very low number."""
    seen_xK: Bool[Tensor, "*x K"] | None
    """Visible keys; None when every key is."""
    n_x1: Float[Tensor, "*x 1"]
    """How many keys each row sees."""

    def scaled(self, factor: Tensor) -> Tensor:
        """Return factor·z, hidden keys still hidden: a factor may well be 0."""
        z = factor * self.z_xK
        return (
            z if self.seen_xK is None else z.masked_fill(~self.seen_xK, lowest(z.dtype))
        )

    def only_seen(self, w_xK: Tensor) -> Tensor:
        """Return the weights with exact zeros on hidden keys."""
        return w_xK if self.seen_xK is None else w_xK.masked_fill(~self.seen_xK, 0.0)


def rows(
    scores: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    visible: Tensor | None = None,
) -> Rows:
    """Return scores/τ with hidden keys (mask False, or -inf) set to a finite low.

    Finite, because -inf times a zero weight is NaN in the backward pass. 16-bit scores
    are computed in float32: thresholds found by bisection fail in bfloat16.
    """
    z = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = z != -math.inf if mask is None else (z != -math.inf) & mask  # NaN is seen
    z = (z if temperature == 1.0 else z / temperature).masked_fill(
        ~seen, lowest(z.dtype)
    )
    n = seen.sum(-1, keepdim=True) if visible is None else visible.unsqueeze(-1)
    return Rows(z, seen, n.to(z.dtype))


def lowest(dtype: torch.dtype) -> float:
    """Return a score whose exponential is 0, and whose sums do not overflow."""
    return -math.sqrt(torch.finfo(dtype).max)


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
