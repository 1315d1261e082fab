"""Emadi's Fig. 3: the theorem against brute force, exact θ and the heuristic.

Axes, in this file:  N row · K key · S sign vector.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.claims.emadi_theta import sorted_prefix
from equipoise.lab.evidence import Evidence, rounded, surroundings
from equipoise.lab.experiment import SEEDS
from equipoise.lab.statistics import Runs
from equipoise.numerics.balance import balance

TEMPERATURES = (0.1, 1.0, 10.0)
LENGTHS = (4, 8, 12)
DRAWS = 200
MEASURES = ("norm", "theta_error", "heuristic_error", "heuristic_wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Rows of one length and temperature."""

    keys: int
    tau: float
    norm: float
    """Mean of ‖J‖_{∞→1}, found by trying every sign vector."""
    theta_error: float
    """Largest |θ - τ·norm|: the theorem, with exact θ."""
    heuristic_error: float
    """The same with the paper's sorted-prefix heuristic in place of θ."""
    heuristic_wrong: float
    """Share of rows in which the heuristic is off by more than rounding."""


def figure3(seed: int = 42) -> list[Point]:
    """Return a point per length and temperature; scores are N(0, 1), as in App. E.2."""
    rng = torch.Generator().manual_seed(seed)
    scores = {
        K: torch.randn(DRAWS, K, generator=rng, dtype=torch.float64) for K in LENGTHS
    }
    return [_point(z_NK, tau) for z_NK in scores.values() for tau in TEMPERATURES]


def theorem_evidence() -> Evidence:
    """Return the figure over Emadi's three seeds, as the lab keeps its results."""
    start = time.process_time()
    runs: dict[str, Runs] = {}
    for seed in SEEDS:
        for point in figure3(seed):
            arm = f"{point.keys} keys, τ = {point.tau:g}"
            runs.setdefault(arm, {})[seed] = rounded(
                {name: getattr(point, name) for name in MEASURES}
            )
    return Evidence(
        name="theorem",
        question="Is ‖J‖ from ∞ to 1 of a softmax row exactly θ/τ?",
        measures=MEASURES,
        seeds=SEEDS,
        arms={arm: {} for arm in runs},
        baselines={},
        runs=runs,
        about={
            **surroundings(),
            "command": "equipoise lab theorem",
            "cpu_minutes": rounded((time.process_time() - start) / 60),
        },
    )


def _point(z_NK: Tensor, tau: float) -> Point:
    p_NK = (z_NK / tau).softmax(-1)
    norm_N = brute_force(z_NK, tau)
    ours_N, theirs_N = balance(p_NK).lower / tau, sorted_prefix(p_NK) / tau
    # Against the largest possible norm: a saturated row's own is lost to rounding.
    off_N = (theirs_N - norm_N).abs() * tau
    return Point(
        keys=z_NK.shape[-1],
        tau=tau,
        norm=norm_N.mean().item(),
        theta_error=((ours_N - norm_N).abs() * tau).max().item(),
        heuristic_error=off_N.max().item(),
        heuristic_wrong=(off_N > 1e-9).double().mean().item(),
    )


def brute_force(z_NK: Tensor, tau: float) -> Tensor:
    """Return max over x = ±1 of ‖J x‖₁, with J from autograd: no formula of ours."""

    def row(z_K: Tensor) -> Tensor:
        return (z_K / tau).softmax(-1)

    J_NKK = torch.func.vmap(torch.func.jacrev(row))(z_NK)
    K = z_NK.shape[-1]
    bits_SK = (torch.arange(2**K)[:, None] >> torch.arange(K)) & 1
    sign_SK = (2 * bits_SK - 1).to(z_NK.dtype)
    norm_N: Tensor = torch.stack([(sign_SK @ J.T).abs().sum(-1).max() for J in J_NKK])
    return norm_N
