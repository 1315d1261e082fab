"""The threshold of α-entmax by Newton's method: no sorting, a handful of visits.

Axes, in this file:  x any leading axes · K key.

With a = α − 1, u = [a·z − t]₊ and p = u^(1/a), t is where ‖u‖_{1/a} = 1. That norm is
convex and falls in t, so Newton's steps from the left, t = a·z_max − 1 where it is at
least 1, never pass the root; for equal scores the norm is linear: one step is enough.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_STEPS = 60
_CACHED = 1 << 16
_TINY = 1e-30
_NEAR = 1e-12
_FAINT = -80.0


class Entmax(Function):
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
        g_xK = _slopes(u_xK, p_xK, learnt if ctx.a is None else ctx.a)
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


def _slopes(u_xK: Tensor, p_xK: Tensor, a: Tensor | float) -> Tensor:
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
