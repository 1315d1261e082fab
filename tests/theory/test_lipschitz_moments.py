"""Eigenvalues from above: never below the truth, and as close as promised."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from equipoise.theory.lipschitz.heads import HeadNorm, rotary
from equipoise.theory.lipschitz.local import moment_norm, moment_root
from tests.theory.lipschitz_cases import NORMS, ROTATIONS

sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


@given(seeds, sizes, sizes, st.integers(0, 8))
def test_the_norm_is_within_its_stated_bounds(
    seed: int, A: int, B: int, s: int
) -> None:
    m = normal(seed, 3, A, B)
    truth = torch.linalg.svdvals(m)[..., 0]
    found = moment_norm(m, squarings=s)
    assert (truth <= found * (1 + 1e-12)).all()
    assert (found <= truth * min(A, B) ** (0.5 ** (s + 1)) * (1 + 1e-12)).all()


@given(seeds, sizes)
def test_product_of_two_gram_matrices(seed: int, A: int) -> None:
    a, b = normal(seed, 2, A, 5)
    truth = torch.linalg.svdvals(a.T @ b)[0]
    found = moment_root((a @ a.T) @ (b @ b.T)).sqrt()
    assert truth <= found * (1 + 1e-9) and found <= truth * A ** (1 / 512) * (1 + 1e-9)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_power_overflows(scale: float, dtype: torch.dtype) -> None:
    m = (scale * normal(0, 6, 6)).to(dtype)
    truth = float(torch.linalg.svdvals(m.double())[0])
    assert float(moment_norm(m)) == pytest.approx(truth, rel=5e-3)


def test_zero_and_nan_matrices() -> None:
    stack = torch.stack([torch.zeros(2, 2), torch.full((2, 2), math.nan), torch.eye(2)])
    found = moment_norm(stack)
    assert found[0] == 0 and found[1].isnan() and 1 <= found[2] < 1.01


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_norms_pull_back_like_autograd(name: str) -> None:
    norm = NORMS[name]
    u, g = normal(1, 2, 3, 4)
    _, pull = torch.func.vjp(norm.normalised, u)
    torch.testing.assert_close(norm.pulled(g, u), pull(g)[0])


def test_norms_match_torch() -> None:
    u, gain = normal(2, 3, 4), normal(3, 4)
    rms = HeadNorm(gain_E=gain, eps=0.1).normalised(u)
    layer = HeadNorm(gain_E=gain, eps=0.1, centred=True).normalised(u)
    F = torch.nn.functional
    torch.testing.assert_close(rms, F.rms_norm(u, (4,), gain, 0.1))
    torch.testing.assert_close(layer, F.layer_norm(u, (4,), gain, None, 0.1))
    unit = HeadNorm(gain_E=torch.full((4,), 0.5, dtype=torch.float64)).normalised(u)
    torch.testing.assert_close(unit, F.normalize(u, dim=-1))


@pytest.mark.parametrize("name", ["halves", "neighbours", "partial"])
def test_rotations_are_undone(name: str) -> None:
    tables, at = ROTATIONS[name], torch.tensor([4, 0, 2])
    u = normal(4, 3, 4)
    turned = tables.rotate(u, at)
    torch.testing.assert_close(tables.rotate_back(turned, at), u)
    torch.testing.assert_close(turned.norm(dim=-1), u.norm(dim=-1))


def test_scores_depend_on_distance_alone() -> None:
    tables, (q, k) = rotary(9, 4), normal(5, 2, 1, 4)
    score = [
        tables.rotate(q, torch.tensor([i])) @ tables.rotate(k, torch.tensor([j])).T
        for i, j in [(2, 0), (8, 6)]
    ]
    torch.testing.assert_close(*score)
