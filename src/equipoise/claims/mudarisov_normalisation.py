"""Mudarisov et al. (2025), §2: what dividing by a sum forbids, and what it does not."""

import math

import torch
from torch import Tensor
from torch.func import jacrev

from equipoise.claims.mudarisov_gradient import PAPER
from equipoise.claims.verdict import Verdict
from equipoise.numerics.normalisers import NORMALISERS, attention_weights, rows
from equipoise.numerics.normalisers.exponential import ScalableSoftmax
from equipoise.numerics.selection import range_needed, weight_interval

LENGTHS = (10, 100, 1000, 10_000)


def lemma_1() -> Verdict:
    """The printed interval can exceed 1; the tight one is attained at both ends."""
    evidence = {}
    for rho in (1.0, 4.0):
        for n in (10, 1000):
            ends = weight_interval(torch.tensor(rho).double(), torch.tensor(float(n)))
            evidence[f"printed upper, ρ = {rho:g}, n = {n}"] = math.exp(rho) / n
            evidence[f"attained, ρ = {rho:g}, n = {n}"] = _alone(rho, n)
            evidence[f"tight upper, ρ = {rho:g}, n = {n}"] = ends.upper.item()
    return Verdict(
        paper=PAPER,
        where="Lemma 1, Corollary 1",
        claim="e^{−2Δ/T}/L ≤ α_i ≤ e^{2Δ/T}/L, Δ = ‖q‖‖k‖.",
        outcome="corrected",
        evidence=evidence,
        instead="1/(1+(L−1)e^ρ) ≤ α_i ≤ 1/(1+(L−1)e^{−ρ}), ρ = (l_max−l_min)/T, both "
        "ends attained; Δ must take the largest key.",
    )


def vanishing_weights() -> Verdict:
    """Weights vanish at a fixed range of logits only, not at one that grows as ln L."""
    evidence = {}
    for n in LENGTHS:
        evidence[f"range fixed at 4, n = {n}"] = _alone(4.0, n)
        evidence[f"range ln(n−1), n = {n}"] = _alone(range_needed(n, 0.5), n)
        for s in (0.4, 0.6):
            evidence[f"ssmax s = {s:g}, gap 2, n = {n}"] = _winner(s, n)
    kept = evidence["range ln(n−1), n = 10000"] > 0.499
    return Verdict(
        paper=PAPER,
        where="Lemma 1, discussion",
        claim="A normaliser that divides by a sum cannot select in a long context.",
        outcome="fails" if kept else "holds",
        evidence=evidence,
        instead="It cannot at a fixed range of logits. One key keeps a share c as long "
        "as ρ ≥ ln((L−1)c/(1−c)); scalable softmax keeps its winner where s·gap > 1.",
    )


def self_adjusted_spectrum() -> Verdict:
    """The Jacobian of self-adjusted softmax has no bound, plain or normalised."""
    evidence = {}
    for c in (1.0, 10.0, 100.0):
        z = torch.full((1, 2), c, dtype=torch.float64)
        J = NORMALISERS["self-adjusted"]().jacobian(rows(z)).dense()[0]
        evidence[f"plain, two logits of {c:g}"] = _norm(J)
    for span in (1.0, 0.1, 0.01, 0.001):
        z_K = span * torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64)
        evidence[f"normalised, span {span:g}"] = _norm(jacrev(_normalised)(z_K))
        safe = NORMALISERS["self-adjusted-safe"]().jacobian(rows(z_K)).dense()
        evidence[f"our safe form, span {span:g}"] = _norm(safe)
    grows = evidence["normalised, span 0.001"] > 100
    return Verdict(
        paper=PAPER,
        where="§5, on self-adjusted softmax",
        claim="It keeps the spectrum of the Jacobian in a healthy band.",
        outcome="fails" if grows else "holds",
        evidence=evidence,
        instead="z·softmax(z) has ‖J‖₂ = (1+c)/2 at two logits c; the normalised form "
        "grows like 1/R as the range R shrinks. Adding η = 1 above and below bounds it "
        "by ½ + (1+√2)/η.",
    )


def _normalised(z_K: Tensor) -> Tensor:
    low, high = z_K.min().clamp(max=0.0), z_K.max().clamp(min=0.0)
    return (z_K - low) / (high - low) * z_K.softmax(-1)


def _norm(J_KK: Tensor) -> float:
    return float(torch.linalg.matrix_norm(J_KK, ord=2))


def _alone(rho: float, n: int) -> float:
    """Return the weight of one logit ρ above n − 1 equal ones."""
    z = torch.zeros(n, dtype=torch.float64)
    z[0] = rho
    return float(z.softmax(-1)[0])


def _winner(s: float, n: int) -> float:
    z = torch.zeros(1, n, dtype=torch.float64)
    z[0, 0] = 2.0
    return float(attention_weights(ScalableSoftmax(s), z)[0, 0])
