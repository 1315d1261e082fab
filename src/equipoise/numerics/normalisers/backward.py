"""Rivals with their derivative written out: fewer visits to the scores than autograd's.

Axes, in this file:  x any leading axes · K key.
Attention at length L visits L² scores; what a normaliser costs is how often it does.
Each function here can be differentiated once.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lowest(dtype: torch.dtype) -> float:
    """Return a score whose exponential is 0, and whose sums do not overflow."""
    return -math.sqrt(torch.finfo(dtype).max)


def _dot(a_xK: Tensor, b_xK: Tensor) -> Tensor:
    dot_x: Tensor = torch.linalg.vecdot(a_xK, b_xK)
    return dot_x.unsqueeze(-1)


class Floored(Function):
    """max(z, lowest), and the gradient as it comes: it is 0 where a key is hidden."""

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor) -> Tensor:
        return z_xK.clamp_min(lowest(z_xK.dtype))

    @staticmethod
    def backward(ctx: Any, slope_xK: Tensor) -> Tensor:
        return slope_xK


class Scaled(Function):
    """factor·z with hidden keys left where they are."""

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor, factor_x1: Tensor) -> Tensor:
        ctx.save_for_backward(z_xK, factor_x1)
        low = lowest(z_xK.dtype)
        return (z_xK * factor_x1).masked_fill_(z_xK <= low, low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> tuple[Tensor, Tensor | None]:
        z_xK, factor_x1 = ctx.saved_tensors
        learnt = None
        if ctx.needs_input_grad[1]:
            learnt = _dot(slope_xK, z_xK).sum_to_size(factor_x1.shape)
        return slope_xK * factor_x1, learnt


class GradientSink(Function):
    """e^z/(e^b + Σe^z) = softmax(z)·σ(ln Σe^z − b); ln Σe^z = z_max − ln p_max."""

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor, b_x1: Tensor) -> Tensor:
        w_xK = z_xK.softmax(-1)
        top_x1 = w_xK.amax(-1, keepdim=True)
        total_x1 = z_xK.amax(-1, keepdim=True) - top_x1.log()
        w_xK.mul_(torch.sigmoid(total_x1 - b_x1))
        ctx.save_for_backward(w_xK, torch.sigmoid(b_x1 - total_x1))
        ctx.shape = b_x1.shape
        return w_xK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> tuple[Tensor, Tensor]:
        w_xK, sunk_x1 = ctx.saved_tensors
        mean_x1 = _dot(slope_xK, w_xK)
        return (slope_xK - mean_x1).mul_(w_xK), (-mean_x1 * sunk_x1).sum_to_size(
            ctx.shape
        )


class SelfWeighted(Function):
    """z·softmax(z). J = diag(p(1 + z)) − w pᵀ."""

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor) -> Tensor:
        p_xK = z_xK.softmax(-1)
        w_xK = z_xK * p_xK
        ctx.save_for_backward(p_xK, w_xK)
        return w_xK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> Tensor:
        p_xK, w_xK = ctx.saved_tensors
        mean_x1 = _dot(slope_xK, w_xK)
        return ((slope_xK - mean_x1).mul_(p_xK)).addcmul_(slope_xK, w_xK)


class SpanWeighted(Function):
    """a·softmax(z), a = (z − m + η)/(R + η), m = min(z, 0), R = max(z, 0) − m.

    J = diag(p(a + 1/(R+η))) − (ap)pᵀ less two columns, at the largest and the smallest
    score, where m and R feel them.
    """

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor, eta: float) -> Tensor:
        seen_xK = z_xK.masked_fill(z_xK <= lowest(z_xK.dtype), 0.0)
        low_x1 = seen_xK.amin(-1, keepdim=True).clamp_max_(0.0)
        span_x1 = seen_xK.amax(-1, keepdim=True).clamp_min_(0.0) - low_x1 + eta
        p_xK = z_xK.softmax(-1)
        w_xK = seen_xK.sub_(low_x1 - eta).div_(span_x1).mul_(p_xK)
        ctx.save_for_backward(z_xK, p_xK, w_xK, span_x1, low_x1)
        ctx.eta = eta
        return w_xK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> tuple[Tensor, None]:
        z_xK, p_xK, w_xK, span_x1, low_x1 = ctx.saved_tensors
        up_x1, mean_x1 = _dot(slope_xK, w_xK), _dot(slope_xK, p_xK)
        pull_xK = (slope_xK / span_x1).sub_(up_x1).mul_(p_xK)
        pull_xK.addcmul_(slope_xK, w_xK)
        top_x1 = span_x1 + low_x1 - ctx.eta
        high = torch.where(top_x1 > 0, up_x1 / span_x1, 0.0)
        pull_xK.scatter_add_(-1, z_xK.argmax(-1, keepdim=True), -high)
        low = torch.where(low_x1 < 0, (mean_x1 - up_x1) / span_x1, 0.0)
        least_x1 = (z_xK - low_x1).abs_().argmin(-1, keepdim=True)
        return pull_xK.scatter_add_(-1, least_x1, -low), None


class Rectified(Function):
    """relu(e^z − 1)/(Σ|e^z − 1| + ε), with e^z − 1 read off ``expm1``: near 0 the
    difference of two exponentials has no digits left.
    """

    @staticmethod
    def forward(ctx: Any, z_xK: Tensor, epsilon: float) -> Tensor:
        rise_xK, shift_x1 = risen(z_xK)
        total_x1 = rise_xK.abs().sum(-1, keepdim=True)
        unit_x1 = torch.exp(-shift_x1)
        total_x1 += epsilon * unit_x1
        w_xK = rise_xK.clamp_min(0.0).div_(total_x1)
        ctx.save_for_backward(rise_xK, w_xK, total_x1, unit_x1)
        return w_xK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_xK: Tensor) -> tuple[Tensor, None]:
        rise_xK, w_xK, total_x1, unit_x1 = ctx.saved_tensors
        mean_x1 = _dot(slope_xK, w_xK)
        pull_xK = torch.where(rise_xK > 0, slope_xK - mean_x1, mean_x1)
        pull_xK.mul_(rise_xK + unit_x1).div_(total_x1)
        return pull_xK.masked_fill_(rise_xK == 0, 0.0), None


# e^z of float32 and a sum of a million of them stay finite up to here.
_TALL = 70.0


def risen(z_xK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e^z − 1)·e^(−s), 0 on hidden keys, and s: 0 unless scores are huge."""
    hidden_xK = z_xK <= lowest(z_xK.dtype)
    top_x1 = z_xK.amax(-1, keepdim=True)
    if not bool((top_x1 > _TALL).any()):
        rise_xK = torch.expm1(z_xK).masked_fill_(hidden_xK, 0.0)
        return rise_xK, torch.zeros_like(top_x1)
    shift_x1 = top_x1.clamp_min(0.0)
    small_xK = torch.expm1(z_xK.clamp(-1, 1)) * torch.exp(-shift_x1)
    large_xK = torch.exp(z_xK - shift_x1) - torch.exp(-shift_x1)
    rise_xK = torch.where(z_xK.abs() < 1, small_xK, large_xK)
    return rise_xK.masked_fill_(hidden_xK, 0.0), shift_x1
