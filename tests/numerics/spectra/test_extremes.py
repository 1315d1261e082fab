"""Extreme eigenvalues in bounded memory, against a dense decomposition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Search, Status
from equipoise.numerics.spectra.extremes import top_eigenvalues

TIGHT = Search(tolerance=1e-8, at_most=2000)


def symmetric(width: int, *, seed: int, decay: float) -> torch.Tensor:
    """Return a matrix of a few large eigenvalues on both sides and a bulk."""
    rng = torch.Generator().manual_seed(seed)
    q_NN = torch.linalg.qr(
        torch.randn(width, width, generator=rng, dtype=torch.float64)
    ).Q
    sign_N = torch.randn(width, generator=rng, dtype=torch.float64).sign()
    size_N = torch.arange(1, width + 1, dtype=torch.float64) ** -decay
    return (q_NN * (sign_N * size_N)) @ q_NN.mT


@given(
    width=st.integers(3, 60),
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
    decay=st.sampled_from([0.5, 1.0, 2.0]),
    smallest=st.booleans(),
)
def test_both_ends_match_the_dense_spectrum(
    width: int, count: int, seed: int, decay: float, smallest: bool
) -> None:
    count = min(count, width)
    a_NN = symmetric(width, seed=seed, decay=decay)
    start_N = torch.randn(
        width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    found = top_eigenvalues(
        lambda x: a_NN @ x, start_N, count=count, smallest=smallest, search=TIGHT
    )
    truth = np.linalg.eigvalsh(a_NN.numpy())
    wanted = truth[:count] if smallest else truth[::-1][:count]
    assert np.allclose([e.value for e in found], wanted, atol=1e-7)
    for e in found:
        assert e.vector is not None
        left = a_NN @ e.vector - e.value * e.vector
        assert float(left.norm()) <= e.residual + 1e-10


def test_memory_is_bounded_and_restarts_find_close_pairs() -> None:
    """Five close eigenvalues, a space of nine: it must restart many times."""
    size_N = torch.cat([1 + torch.arange(5) * 1e-2, torch.linspace(-0.9, 0.9, 395)])
    d_N = size_N.double()
    start_N = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    found = top_eigenvalues(lambda x: d_N * x, start_N, count=5, memory=9, search=TIGHT)
    assert np.allclose(
        [e.value for e in found], [1.04, 1.03, 1.02, 1.01, 1.0], atol=1e-9
    )
    assert found[0].status is Status.RESIDUAL and found[0].steps > 9
    gram = torch.stack([e.vector for e in found if e.vector is not None])
    assert torch.allclose(gram @ gram.mT, torch.eye(5).double(), atol=1e-10)


def test_float32_keeps_its_basis_orthogonal() -> None:
    d_N = torch.logspace(0, -6, 300)
    start_N = torch.randn(300, generator=torch.Generator().manual_seed(0))
    found = top_eigenvalues(
        lambda x: d_N * x, start_N, count=4, search=Search(tolerance=1e-4)
    )
    # Ghosts would show as a value found twice.
    assert np.allclose([e.value for e in found], d_N[:4].tolist(), rtol=1e-5)


def test_a_space_that_closes_says_so() -> None:
    d_N = torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    found = top_eigenvalues(lambda x: d_N * x, torch.ones(4).double(), count=2)
    assert found[0].status is Status.CLOSED
    assert [round(e.value, 12) for e in found] == [2.0, 1.0]  # multiplicity is unseen


def test_a_limit_is_a_status() -> None:
    d_N = torch.linspace(0, 1, 500, dtype=torch.float64)
    found = top_eigenvalues(
        lambda x: d_N * x, torch.ones(500).double(), search=Search(at_most=3)
    )
    assert found[0].status is Status.STEP_LIMIT and found[0].steps == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_products_give_nothing(bad: float) -> None:
    found = top_eigenvalues(lambda x: x * bad, torch.ones(5), count=2)
    assert len(found) == 2 and all(e.status is Status.BROKEN for e in found)


def test_wrong_inputs() -> None:
    with pytest.raises(InputError, match="start vector"):
        top_eigenvalues(lambda x: x, torch.ones(2, 2))
    with pytest.raises(InputError, match="count 6"):
        top_eigenvalues(lambda x: x, torch.ones(5), count=6)
    with pytest.raises(InputError, match="memory 3"):
        top_eigenvalues(lambda x: x, torch.ones(50), count=3, memory=3)
