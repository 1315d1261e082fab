"""Petrov et al. (2025): what is claimed of the loss as samples are added."""

import math

import torch
from torch import Tensor

from equipoise.claims.verdict import PETROV, Found


@PETROV.claim("Thm 7")
def taylor_needs_a_remainder() -> Found:
    """Theorem 7 on ℓ₁ = 0 and ℓ₂ = w⁴ around the minimiser 0 of both, at w = 1.

    Claim: |L_{k+1}(w) − L_k(w)| ≤ 2Λ/(k+1) + M‖w − w*‖²/(k+1).

    Instead: Around any w0: [|ℓ_{k+1} − L_k| + ‖g_{k+1} − g‖‖δ‖ + ½‖H_{k+1} − H‖‖δ‖² +
    (ρ/3)‖δ‖³]/(k+1), ρ a Lipschitz constant of the Hessians; and Λ, not 2Λ.
    """

    def difference(w: Tensor) -> Tensor:
        return (0 + w**4) / 2 - 0 * w

    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    bend = torch.autograd.functional.hessian(lambda w: (w**4).sum(), zero)
    values_at_minimum = float(zero**4)
    bound = (2 * values_at_minimum + float(bend.abs().max())) / 2
    truth = float(difference(one))
    return "fails" if truth > bound else "holds", {
        "bound at k = 1, w = 1": bound,
        "difference": truth,
    }


@PETROV.claim("Fig 6")
def slope_of_running_means() -> Found:
    """Fig 6 draws |L_{k+1} − L_k| at w*, where the Hessian term is zero.

    Claim: A slope of −1 of |L_{k+1} − L_k| confirms the curvature bound.

    Instead: E(L_{k+1} − L_k)² = Var ℓ/(k(k+1)): −1 is a property of running means; look
    away from w*, and beside the null.
    """
    rng = torch.Generator().manual_seed(0)
    draws, k = 64, torch.arange(1000, 100_000, dtype=torch.float64)
    slopes = []
    for _ in range(draws):
        losses = torch.rand(100_000, generator=rng, dtype=torch.float64)
        means = losses.cumsum(0) / torch.arange(1, 100_001, dtype=torch.float64)
        steps = means.diff().abs()[999:].clamp_min(1e-300)
        slopes.append(_slope(k[: len(steps)].log(), steps.log()))
    mean = sum(slopes) / draws
    spread = math.sqrt(sum((s - mean) ** 2 for s in slopes) / (draws - 1) / draws)
    return "fails" if abs(mean + 1) < 3 * spread + 0.01 else "holds", {
        "slope of uniform random numbers": mean,
        "standard error": spread,
    }


@PETROV.claim("Fig 12, Assumption 1")
def gradient_sums_stall_in_bfloat16() -> Found:
    """Fig 12 sums gradients in bf16: a running sum stops growing, its mean decays.

    Claim: The norm of the mean gradient falls as samples are added.

    Instead: Sum in float32 or wider: a bf16 sum of one constant stalls below 2⁹ of it,
    and its mean decays as 1/k by arithmetic alone.
    """
    count, value = 4096, torch.tensor(0.0800, dtype=torch.bfloat16)
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(count):
        total = total + value
    mean = float(total) / count
    return "fails" if mean < 0.5 * float(value) else "holds", {
        "true mean": float(value),
        "mean of 4096 from a bf16 sum": mean,
        "where the sum stalls": float(total),
    }


def _slope(x: Tensor, y: Tensor) -> float:
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
