"""The bracket against brute force over directions in the plane, and known rows."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from equipoise_lab.theory.lipschitz.joint import block_inf_norm

seeds = st.integers(0, 2**32 - 1)


def brute(j_KDC: Tensor) -> float:
    """Return max_y Σ_j ‖J_j y‖ over 20000 directions of the plane."""
    angle = torch.linspace(0, math.pi, 20001, dtype=torch.float64)
    y = torch.stack([angle.cos(), angle.sin()])
    return float((j_KDC @ y).norm(dim=1).sum(0).max())


@settings(max_examples=60)
@given(seeds, st.integers(1, 6), st.sampled_from([0.0, 1.0, 3.0]))
def test_the_truth_lies_in_the_bracket(seed: int, K: int, spread: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    sizes = (spread * torch.randn(K, 1, 1, generator=rng, dtype=torch.float64)).exp()
    j = sizes * torch.randn(K, 2, 2, generator=rng, dtype=torch.float64)
    lower, upper = block_inf_norm(j)
    truth = brute(j)
    assert lower <= truth * (1 + 1e-7)  # the grid is 1.6e-4 wide: its square is lost
    assert truth <= upper * (1 + 1e-9)
    assert truth <= lower * (1 + 1e-2)
    assert upper <= lower * 1.2


@given(seeds)
def test_one_block_is_its_spectral_norm(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    j = torch.randn(1, 4, 5, generator=rng, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm(j[0], ord=2))
    assert block_inf_norm(j) == pytest.approx((norm, norm), rel=1e-4)


def test_orthogonal_rank_ones_add_in_squares() -> None:
    """J_j = e_1 ⊗ e_j: Σ_j |y_j| ≤ √K, not K as the sum of norms says."""
    eye = torch.eye(4, dtype=torch.float64)
    j = torch.stack([torch.outer(eye[0], e) for e in eye])
    assert block_inf_norm(j) == pytest.approx((2.0, 2.0), rel=1e-3)


def test_more_steps_never_hurt() -> None:
    rng = torch.Generator().manual_seed(5)
    j = torch.randn(8, 6, 6, generator=rng, dtype=torch.float64)
    uppers = [float(block_inf_norm(j, steps=s).upper) for s in (1, 2, 4, 8, 16)]
    assert uppers == sorted(uppers, reverse=True)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(torch.zeros(3, 2, 2), 0.0), (torch.full((3, 2, 2), math.nan), math.nan)],
)
def test_empty_and_broken_rows(blocks: Tensor, expected: float) -> None:
    assert block_inf_norm(blocks) == pytest.approx((expected, expected), nan_ok=True)
