"""Mudarisov et al. (2025), §3.3: how strongly normalised attention reacts to logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from equipoise.claims.verdict import Verdict
from equipoise.theory.softmax_norms import SUPREMA, softmax_jacobian_norms

PAPER = "mudarisov2025"
Weight = Callable[[Tensor], Tensor]

# Positive functions F of one logit; α = F(l)/ΣF(l).
FAMILIES: dict[str, Weight] = {
    "exp": torch.exp,
    "exp(l/0.1)": lambda z: torch.exp(z / 0.1),
    "softplus": torch.nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "quadratic": lambda z: 1 + z.square(),
    "elu + 1": lambda z: torch.nn.functional.elu(z) + 1,
}


def corollary_3() -> Verdict:
    """Two equal logits: the spectral norm is 1/(2T), twice and 35 times the claim."""
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    evidence = {}
    for T in (1.0, 0.1, 0.01):
        norms = softmax_jacobian_norms(half, temperature=T)
        evidence[f"claimed at T = {T:g}"] = min(1 / (4 * T), 2**0.5)
        evidence[f"spectral norm at T = {T:g}"] = float(norms.spectral)
        evidence[f"Frobenius norm at T = {T:g}"] = float(norms.frobenius)
        evidence[f"row length at T = {T:g}"] = float(norms.row)
        evidence[f"largest entry at T = {T:g}"] = float(norms.entry)
    evidence["measured change per unit, T = 0.01"] = _finite_difference(0.01, 1e-3)
    return Verdict(
        paper=PAPER,
        where="Cor. 3",
        claim="The gradient of softmax(l/T) has norm at most min{1/(4T), √2}.",
        outcome="fails" if evidence["spectral norm at T = 1"] > 0.25 else "holds",
        evidence=evidence,
        instead="1/(4T) bounds single entries; the spectral and Frobenius norms reach "
        "1/(2T), rows √2/(4T). A finite step ε obeys min{1/(2T), √2/ε}: the diameter "
        "of the simplex has to be divided by the step.",
    )


def lemma_2() -> Verdict:
    """J = (diag α − ααᵀ)·diag(h), h = F'/F: the slope of ln F decides, not min F."""
    z_NK = torch.randn(
        300, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    tie_NK = z_NK[:, :1].expand(-1, 2)
    evidence = {}
    for name, F in FAMILIES.items():
        evidence[f"largest norm / max|h|, {name}"] = _ratio(F, z_NK)
        evidence[f"at two equal logits, {name}"] = _ratio(F, tie_NK)
    worst = max(evidence.values())
    return Verdict(
        paper=PAPER,
        where="Lemma 2",
        claim="The gradient of α = F(l)/ΣF is governed by 1/min F.",
        outcome="corrected" if worst <= SUPREMA["spectral"] + 1e-12 else "fails",
        evidence=evidence,
        instead="‖J‖₂ ≤ ½·max|F'/F| and every entry ≤ ¼·max|F'/F|, both attained at "
        "two equal logits, for every positive F.",
    )


def vanishing_minimum() -> Verdict:
    """One logit to −∞: min F of softmax vanishes, and its Jacobian does not care."""
    evidence = {}
    for low in (-1.0, -10.0, -100.0):
        z_1K = torch.tensor([[1.0, 0.5, low]], dtype=torch.float64)
        evidence[f"min F at {low:g}"] = float(z_1K.exp().min())
        evidence[f"norm at {low:g}"] = float(_norms(torch.exp, z_1K))
    shrinking = torch.tensor([[0.0, 1e-6, 1.0]], dtype=torch.float64)
    evidence["norm of F = l² near 0"] = float(_norms(_square, shrinking))
    bounded = all(v <= 0.5 for k, v in evidence.items() if k.startswith("norm at"))
    return Verdict(
        paper=PAPER,
        where="§3.3, after Lemma 2",
        claim="Any normaliser whose minimum vanishes inherits the instability.",
        outcome="fails" if bounded else "holds",
        evidence=evidence,
        instead="Only max|F'/F| matters: it is 1/T for softmax however small F gets, "
        "and the Jacobian of F = l² stays small near its zero too.",
    )


def _square(z: Tensor) -> Tensor:
    return z.square()


def _finite_difference(T: float, step: float) -> float:
    v = torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5
    half = step * v / (2 * T)  # a step of the given length, across the tie
    before, after = torch.softmax(-half, -1), torch.softmax(half, -1)
    return float((after - before).norm() / step)


def _norms(F: Weight, z_NK: Tensor) -> Tensor:
    """Return ‖∂α/∂l‖₂ of every row, by autograd."""
    J_NKK = vmap(jacrev(lambda z_K: F(z_K) / F(z_K).sum()))(z_NK)
    norms_N: Tensor = torch.linalg.matrix_norm(J_NKK, ord=2)
    return norms_N


def _ratio(F: Weight, z_NK: Tensor) -> float:
    slope_NK = vmap(vmap(jacrev(lambda z: F(z).log())))(z_NK)
    return float((_norms(F, z_NK) / slope_NK.abs().amax(-1)).max())
