"""Sparsemax and α-entmax: weights that can be exactly zero.

Axes, in this file:  x any leading axes · K key.
The projections are solved here, not by the ``entmax`` library: it sorts or bisects, at
several times the cost, and fails on fully masked rows, NaN, 16-bit bisection and α near
1. Tests hold ours against it.

The threshold of α-entmax by Newton's method: no sorting, a handful of visits.

Axes, in this file:  x any leading axes · K key.

With a = α − 1, u = [a·z − t]₊ and p = u^(1/a), t is where ‖u‖_{1/a} = 1. That norm is
convex and falls in t, so Newton's steps from the left, t = a·z_max − 1 where it is at
least 1, never pass the root; for equal scores the norm is linear: one step is enough.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from equipoise.errors import InputError
from equipoise.numerics.normalisers.interface import (
    Interval,
    Lipschitz,
    LowRank,
    Rows,
    covariance,
    scaled,
)
from equipoise.numerics.normalisers.sensitivity import covariance_theta

_STEPS = 60
_CACHED = 1 << 16
_TINY = 1e-30
_NEAR = 1e-12
_FAINT = -80.0


class EntmaxFunction(Function):
    """α-entmax of every row; J = diag(g) − ggᵀ/Σg, g = p^(2−α) on the support."""

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor, alpha: Tensor | float) -> Tensor:
        a = alpha - 1 if isinstance(alpha, Tensor) else float(alpha) - 1
        z_xK = z_xK.contiguous()
        u_xK, p_xK = torch.empty_like(z_xK), torch.empty_like(z_xK)
        for z_nK, a_n1, u_nK, p_nK in _few(z_xK, a, u_xK, p_xK):
            x_nK = (z_nK - z_nK.amax(-1, keepdim=True)).mul_(a_n1)
            p_nK.copy_(_powers(solved(x_nK, a_n1, into=u_nK), a_n1))
        ctx.save_for_backward(u_xK, p_xK, a if isinstance(a, Tensor) else None)
        ctx.a = a if isinstance(a, float) else None
        return p_xK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> tuple[Tensor, Tensor | None]:
        u_xK, p_xK, learnt = ctx.saved_tensors
        g_xK = _support_slopes(u_xK, p_xK, learnt if ctx.a is None else ctx.a)
        total_x1 = g_xK.sum(-1, keepdim=True)
        pull_xK = slope_xK * g_xK
        mean_x1 = pull_xK.sum(-1, keepdim=True) / total_x1
        pull_xK.addcmul_(g_xK, mean_x1, value=-1)
        if not ctx.needs_input_grad[1]:
            return pull_xK, None
        change_xK = _by_alpha(p_xK, g_xK / total_x1, learnt)
        return pull_xK, (slope_xK * change_xK).sum_to_size(learnt.shape)


def _few(
    z_xK: Tensor, a: Tensor | float, u_xK: Tensor, p_xK: Tensor
) -> Iterator[tuple[Tensor, Tensor | float, Tensor, Tensor]]:
    """Yield rows of all four together, as many as a core's cache holds."""
    K = z_xK.shape[-1]
    wide = [x.view(-1, K) for x in (z_xK, u_xK, p_xK)]
    step = len(wide[0]) if z_xK.is_cuda else max(1, _CACHED // max(1, K))
    a_N1 = a.expand(*z_xK.shape[:-1], 1).reshape(-1, 1) if isinstance(a, Tensor) else a
    for start in range(0, len(wide[0]), step):
        z_nK, u_nK, p_nK = (x[start : start + step] for x in wide)
        some = a_N1[start : start + step] if isinstance(a_N1, Tensor) else a_N1
        yield z_nK, some, u_nK, p_nK


def solved(x_xK: Tensor, a: Tensor | float, *, into: Tensor) -> Tensor:
    """Return u = [x − t]₊ at the threshold, for rows whose largest x is 0."""
    t_x1, u_xK = torch.full_like(x_xK[..., :1], -1.0), into
    enough = torch.finfo(x_xK.dtype).eps ** 0.75  # and the next step is its square
    for _ in range(_STEPS):
        torch.sub(x_xK, t_x1, out=u_xK).clamp_min_(0.0)
        step_x1 = _step(u_xK, a)
        t_x1 = t_x1 + step_x1
        if not bool((step_x1.abs() > enough * t_x1.abs()).any()):
            break
    return torch.sub(x_xK, t_x1, out=u_xK).clamp_min_(0.0)


def _step(u_xK: Tensor, a: Tensor | float) -> Tensor:
    """Return Newton's step (‖u‖ − 1)·‖u‖^(e−1)/Σu^(e−1), e = 1/a."""
    if _is(a, 1.0):
        total_x1 = u_xK.sum(-1, keepdim=True)
        count_x1 = u_xK.sign().sum(-1, keepdim=True)
        return (total_x1 - 1) / count_x1
    if _is(a, 0.5):
        norm_x1: Tensor = torch.linalg.vector_norm(u_xK, dim=-1, keepdim=True)
        return (norm_x1 - 1) * norm_x1 / u_xK.sum(-1, keepdim=True)
    power_xK = _raised(u_xK, a)
    total_x1 = power_xK.sum(-1, keepdim=True)
    # Off the support _raised leaves _TINY^(1/a): divided by _TINY it would count.
    below_x1 = power_xK.div_(u_xK.clamp_min(_NEAR)).sum(-1, keepdim=True)
    return (total_x1 - total_x1 ** (1 - a)) / below_x1


def _is(a: Tensor | float, value: float) -> bool:
    return isinstance(a, float) and a == value


def _raised(u_xK: Tensor, a: Tensor | float) -> Tensor:
    """Return u^(1/a), and as good as 0 for u = 0.

    As exp(ln u/a), kept from 0 and from underflow on the way: the vector library's
    logarithm of 0, and its exponential of what underflows, are ten times slower.
    """
    power_xK = u_xK.clamp_min(_TINY).log_().div_(a)
    return power_xK.clamp_min_(_FAINT).exp_()


def _powers(u_xK: Tensor, a: Tensor | float) -> Tensor:
    if _is(a, 1.0):
        return u_xK
    if _is(a, 0.5):
        return u_xK.square()
    power_xK = _raised(u_xK, a).mul_(u_xK > 0)
    return power_xK.div_(power_xK.sum(-1, keepdim=True))


def _support_slopes(u_xK: Tensor, p_xK: Tensor, a: Tensor | float) -> Tensor:
    """Return g = p^(2−α) = u^(e−1) on the support."""
    if _is(a, 1.0):
        return (u_xK > 0).to(u_xK.dtype)
    return u_xK if _is(a, 0.5) else p_xK / u_xK.clamp_min(_TINY)


def _by_alpha(p_xK: Tensor, share_xK: Tensor, a: Tensor) -> Tensor:
    """Return ∂p/∂α = (−p ln p + p/a − (g/Σg)(1/a + H))/a, H the entropy of p.

    From p = u^(1/a): ∂p/∂a = (−p ln p + g(z − t'))/a, where t' makes the sum 0 and
    g·u = p; a common shift of z cancels, so u/a stands for z.
    """
    entropy_xK: Tensor = torch.special.entr(p_xK)
    total_x1 = entropy_xK.sum(-1, keepdim=True) + 1 / a
    return (entropy_xK + p_xK / a - share_xK * total_x1) / a


# ∂p/∂α is a difference of terms of size 1/(α − 1)²: below this float32 has no digits.
LEAST_ALPHA = 1.01


@dataclass(frozen=True, slots=True)
class Entmax:
    """[(α−1)z − t]₊^{1/(α−1)} with t such that the weights sum to 1 (arXiv 1905.05702).

    α = 2 is sparsemax; between 1 and 2 the weights go from softmax to sparsemax. A
    tensor α (per head, broadcast against the given) is learnable. J = diag(g) − g gᵀ/G
    with g = p^{2−α} on the support, so ‖J‖_{∞→1} = G·θ(g/G).
    """

    alpha: float | Tensor = 1.5
    name: str = "entmax"
    sums_to_one: bool = True

    def __post_init__(self) -> None:
        fixed = isinstance(self.alpha, int | float)
        if fixed and not LEAST_ALPHA <= self.alpha <= 2:
            raise InputError(
                f"entmax needs {LEAST_ALPHA} ≤ α ≤ 2, not {self.alpha}: use softmax "
                "for α = 1; beyond 2 the Jacobian is unbounded"
            )

    def weights(self, given: Rows) -> Tensor:
        return given.lit(projected(given.z_xK, self.alpha))

    def jacobian(self, given: Rows) -> LowRank:
        p = given.only_seen(projected(given.z_xK, self.alpha))
        return covariance(_slopes(p, self.alpha))

    def theta(self, given: Rows) -> Interval:
        p = given.only_seen(projected(given.z_xK, self.alpha))
        return covariance_theta(_slopes(p, self.alpha))

    def lipschitz(self, n: int) -> Lipschitz:
        alpha = self.alpha
        largest = float(alpha.max()) if isinstance(alpha, Tensor) else alpha
        return _entmax_constants(largest, n)


@dataclass(frozen=True, slots=True)
class ScalableEntmax:
    """entmax((δ + β·(ln n)^γ)·z): ASEntmax of arXiv 2506.16640 with given δ, β, γ.

    There β and γ come from the query, β = softplus(·) and γ = 2 tanh(·); here they are
    arguments, so a module owns the projection.
    """

    beta: float | Tensor = 1.0
    gamma: float | Tensor = 1.0
    delta: float = 1.0
    alpha: float = 1.5
    name: str = "asentmax"
    sums_to_one: bool = True

    def weights(self, given: Rows) -> Tensor:
        return given.lit(projected(given.scaled(self._factor(given)), self.alpha))

    def _factor(self, given: Rows) -> Tensor:
        return self.delta + self.beta * given.n_x1.clamp_min(1).log() ** self.gamma

    def jacobian(self, given: Rows) -> LowRank:
        factor = self._factor(given)
        p = given.only_seen(projected(given.scaled(factor), self.alpha))
        return scaled(covariance(_slopes(p, self.alpha)), factor)

    def theta(self, given: Rows) -> Interval:
        factor = self._factor(given)
        p = given.only_seen(projected(given.scaled(factor), self.alpha))
        return covariance_theta(_slopes(p, self.alpha), factor=factor)

    def lipschitz(self, n: int) -> Lipschitz:
        power = torch.tensor(math.log(max(n, 1)), dtype=torch.float64) ** self.gamma
        factor = float((self.delta + self.beta * power).max())
        base = _entmax_constants(self.alpha, n)
        return Lipschitz(
            two=factor * base.two,
            infinity_to_one=factor * base.infinity_to_one,
            attained=base.attained,
        )


def projected(z_xK: Tensor, alpha: float | Tensor) -> Tensor:
    """Return α-entmax of every row; what a fully hidden row gets is finite."""
    if isinstance(alpha, Tensor):
        alpha = alpha.clamp_min(LEAST_ALPHA).unsqueeze(-1)
    weights: Tensor = EntmaxFunction.apply(z_xK, alpha)  # type: ignore[no-untyped-call]
    return weights


def _slopes(p_xK: Tensor, alpha: float | Tensor) -> Tensor:
    """Return g = p^{2−α} on the support, 0 off it (where p⁰ would read 1)."""
    if isinstance(alpha, Tensor):
        alpha = alpha.clamp_min(LEAST_ALPHA).expand(p_xK.shape[:-1]).unsqueeze(-1)
    return torch.where(p_xK > 0, p_xK ** (2 - alpha), torch.zeros_like(p_xK))


def _entmax_constants(alpha: float, n: int) -> Lipschitz:
    """Return Lip(α, n) in 2→2 and the ∞→1 bound n^{α−1}, attained for even n."""
    if n < 2:
        return Lipschitz(two=0.0, infinity_to_one=0.0)
    total = n ** (alpha - 1)
    even = n % 2 == 0
    return Lipschitz(
        two=entmax_lipschitz(alpha, n), infinity_to_one=total, attained=even
    )


def entmax_lipschitz(alpha: float, n: int) -> float:
    """Return the largest ‖J‖₂ of α-entmax over rows of n ≥ 2 keys.

    max{2^{α−2}, max_p n·g₁g₂/(g₁ + (n−1)g₂)} with g₁ = p^{2−α} of one key and
    g₂ = ((1−p)/(n−1))^{2−α} of the n−1 others: two equal keys, or one against the rest.

    Example:
        >>> round(entmax_lipschitz(1.5, 47), 4), round(entmax_lipschitz(1.5, 1024), 3)
        (0.7071, 0.869)
    """
    p = torch.linspace(0, 1, 20_003, dtype=torch.float64)[1:-1]
    one, rest = p ** (2 - alpha), ((1 - p) / (n - 1)) ** (2 - alpha)
    against = n * one * rest / (one + (n - 1) * rest)
    return max(float(2.0 ** (alpha - 2)), float(against.max()))
