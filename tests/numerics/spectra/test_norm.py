"""Spectral norms against dense decompositions, and certificates against the truth."""

import math
from collections.abc import Callable
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Estimate, Search, Status
from equipoise.numerics.spectra.lanczos import (
    Krylov,
    Step,
    beyond,
    matrix_step,
    operator_step,
)
from equipoise.numerics.spectra.norm import spectral_norm, spectral_norms
from tests.conftest import FLOATS, error_budget
from tests.oracles import spectra as oracle

seeds = st.integers(0, 2**32 - 1)


def gaussian(seed: int, M: int, N: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=rng, dtype=torch.float64).to(dtype)


SHAPES = {
    "gaussian": lambda n: torch.linspace(0.01, 2.0, n),
    "power law": lambda n: torch.arange(1, n + 1) ** -0.5,
    "one outlier": lambda n: torch.cat([torch.tensor([5.0]), torch.ones(n - 1)]),
    "two nearly equal": lambda n: torch.cat(
        [torch.tensor([1.0, 0.9999]), torch.full((n - 2,), 0.3)]
    ),
    "all equal": torch.ones,
    "rank one": lambda n: torch.tensor([3.0] + [0.0] * (n - 1)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_truth_lies_between_value_and_upper(
    dtype: torch.dtype, shape: str, device: torch.device
) -> None:
    matrix = oracle.with_spectrum(SHAPES[shape](150), 170, seed=0).to(device, dtype)
    found = spectral_norm(matrix)
    truth = oracle.spectral_norm(matrix.cpu())
    used = torch.promote_types(dtype, torch.float32)
    slack = 1 + error_budget(used, ops=16)  # √N·ε of the products
    assert found.certified
    assert found.status in {Status.PROBABLE, Status.CLOSED}
    assert found.value <= truth * slack
    assert truth <= found.upper
    assert found.error <= 1e-4


@settings(max_examples=30)
@given(seeds, st.integers(129, 200), st.integers(129, 200))
def test_random_rectangles(seed: int, M: int, N: int) -> None:
    matrix = gaussian(seed, M, N)
    rng = torch.Generator().manual_seed(seed)
    found = spectral_norm(matrix, generator=rng)
    truth = oracle.spectral_norm(matrix)
    assert found.value * (1 - 1e-5) <= truth <= found.upper


def test_certificate_fails_no_more_often_than_stated() -> None:
    """With failure = ½ the bound may be too small for every second start, no more."""
    n, trials, failure = 40, 400, 0.5
    diagonal = torch.linspace(0, 1, n, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    short = 0
    for _ in range(trials):
        start = torch.randn(n, generator=rng, dtype=torch.float64)
        krylov = Krylov(operator_step(lambda x: diagonal * x), start, at_most=4)
        for _ in range(4):
            krylov.grow()
        top = krylov.top()
        short += top + beyond(krylov, top, failure=failure) < 1.0
    assert 0 < short / trials <= failure


@pytest.mark.parametrize("steps", [3, 9, 17])
@pytest.mark.parametrize("end", [1, -1])
def test_no_larger_eigenvalue_is_missed_along_a_found_component(
    steps: int, end: int
) -> None:
    """|⟨q, x⟩| is known here, so the inequality behind the certificate is checked."""
    rng = torch.Generator().manual_seed(steps)
    diagonal = torch.rand(60, generator=rng, dtype=torch.float64)
    start = torch.randn(60, generator=rng, dtype=torch.float64)
    krylov = Krylov(operator_step(lambda x: diagonal * x), start, at_most=steps)
    for _ in range(steps):
        krylov.grow()
    extreme = diagonal.argmax() if end > 0 else diagonal.argmin()
    component = float((start / start.norm())[extreme].abs())
    failure = component * math.sqrt(2 * 60 / math.pi)
    ritz = float(krylov.ritz()[0][-1 if end > 0 else 0])
    reach = ritz + end * beyond(krylov, ritz, failure=failure, sign=end)
    assert end * (reach - float(diagonal[extreme])) >= 0


@pytest.mark.parametrize(
    "step", [matrix_step, lambda a: operator_step(lambda x: a.mT @ (a @ x))]
)
def test_basis_stays_orthogonal_past_convergence(
    step: Callable[[Tensor], Step],
) -> None:
    matrix = gaussian(0, 300, 300)
    matrix += 3 * torch.outer(gaussian(1, 1, 300)[0], gaussian(2, 1, 300)[0])
    start = gaussian(3, 1, 300)[0]
    krylov = Krylov(step(matrix), start, at_most=60)
    for _ in range(60):
        krylov.grow()
    Q = krylov.basis_KN[:60].double()
    assert (Q @ Q.mT - torch.eye(60)).abs().max() <= error_budget(matrix.dtype, ops=32)


@pytest.mark.parametrize("heads", [1, 3])
def test_thin_products_are_exact_and_never_formed(heads: int) -> None:
    values, outputs = gaussian(0, heads * 200, 32), gaussian(1, heads * 200, 32)
    values, outputs = values.view(heads, 200, 32), outputs.view(heads, 200, 32).mT
    for found, v, o in zip(
        spectral_norms(values, outputs), values, outputs, strict=True
    ):
        assert found.status is Status.EXACT
        assert found.value == pytest.approx(oracle.spectral_norm(v, o), rel=1e-12)
        assert found.upper >= oracle.spectral_norm(v, o)


def test_misaligned_product_keeps_its_digits() -> None:
    """Squaring would lose this one: the factors are 1e9 larger than the product."""
    turn = torch.linalg.qr(gaussian(0, 40, 2, torch.float64)).Q
    left = turn * torch.tensor([1e9, 1.0])
    right = (turn * torch.tensor([1e-9, 1.0])).mT
    found = spectral_norm(left, right)
    assert found.value == pytest.approx(1.0, rel=1e-7)  # 1e9·ε, as found.error says
    assert abs(found.value - 1) <= found.error < 1e-5


def test_long_chains_are_iterated() -> None:
    A, B, C = gaussian(0, 200, 180), gaussian(1, 180, 160), gaussian(2, 160, 210)
    found = spectral_norm(A, B, C)
    truth = oracle.spectral_norm(A, B, C)
    assert found.value * (1 - 1e-5) <= truth <= found.upper


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-12, 1e12, 1e30])
def test_scale_of_the_format_does_not_matter(size: float) -> None:
    matrix = gaussian(0, 150, 150)
    found, truth = spectral_norm(matrix * size), oracle.spectral_norm(matrix * size)
    # A product of numbers below the normal range keeps 16 bits or so, CPU by CPU.
    rel = 1e-5 if size > 1e-38 else 1e-4
    assert found.value == pytest.approx(truth, rel=rel, abs=0.0)


@pytest.mark.parametrize("row", [0, 77])
def test_an_entry_outside_every_sample(row: int) -> None:
    """Rows are sampled for the scale; one far larger entry must not break it."""
    matrix = 1e-15 * gaussian(0, 150, 150)
    matrix[row, 3] = 1e15
    assert spectral_norm(matrix).value == pytest.approx(1e15, rel=1e-5)


def test_warm_start_needs_few_steps_and_claims_less() -> None:
    matrix = gaussian(0, 300, 300)
    matrix += 4 * torch.outer(gaussian(1, 1, 300)[0], gaussian(2, 1, 300)[0]) / 10
    cold = spectral_norm(matrix)
    moved = matrix + 1e-5 * gaussian(3, 300, 300)
    warm = spectral_norm(moved, start=cold.vector)
    assert warm.status is Status.RESIDUAL
    assert warm.steps <= 2 < cold.steps
    assert warm.value == pytest.approx(oracle.spectral_norm(moved), rel=1e-4)
    assert not warm.certified
    assert warm.upper == math.inf


def test_warm_start_in_the_wrong_place_does_not_claim_the_norm() -> None:
    diagonal = torch.diag(torch.linspace(1, 2, 140, dtype=torch.float64))
    start = torch.zeros(140, dtype=torch.float64)
    start[0] = 1.0
    found = spectral_norm(diagonal, start=start)
    assert found.value == pytest.approx(1.0)
    assert found.upper == math.inf


@pytest.mark.parametrize("shape", ["gaussian", "power law"])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-6])
def test_residual_alone_puts_a_singular_value_within_reach(
    shape: str, tolerance: float
) -> None:
    matrix = oracle.with_spectrum(SHAPES[shape](150), 150, seed=1)
    values = torch.linalg.svdvals(matrix)
    search = Search(failure=None, tolerance=tolerance)
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        found = spectral_norm(matrix, search=search, generator=rng)
        assert found.status is Status.RESIDUAL
        assert (values - found.value).abs().min() <= found.residual
        nearest = (values / found.value - 1).abs().min()
        assert nearest <= found.error <= tolerance


def test_step_limit_reports_what_was_reached() -> None:
    matrix = gaussian(0, 300, 300)
    found = spectral_norm(matrix, search=Search(at_most=12))
    assert found.status is Status.STEP_LIMIT
    assert found.steps == 12
    assert found.error > 1e-4
    assert found.value <= oracle.spectral_norm(matrix) <= found.upper


def test_zero_one_and_broken() -> None:
    zero = spectral_norm(torch.zeros(150, 150))
    assert (zero.value, zero.upper, zero.status) == (0.0, 0.0, Status.EXACT)
    assert spectral_norm(torch.full((1, 1), -3.0)).value == 3.0
    for bad in (math.nan, math.inf):
        matrix = gaussian(0, 150, 150)
        matrix[7, 9] = bad
        found = spectral_norm(matrix)
        assert found.status is Status.BROKEN
        assert math.isnan(found.value)
        assert math.isnan(found.upper)
        assert math.isnan(found.lower)


def test_same_seed_same_answer_and_no_global_randomness() -> None:
    matrix = gaussian(0, 150, 150)
    before = torch.get_rng_state()
    assert spectral_norm(matrix).value == spectral_norm(matrix).value
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("status", Status)
def test_every_status_explains_itself(status: Status) -> None:
    assert len(status.explanation) > 20


def test_unusable_input_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one matrix"):
        spectral_norm()
    with pytest.raises(InputError, match="spectral_norms"):
        spectral_norm(torch.ones(2, 2, 2))
    with pytest.raises(InputError, match="real floats"):
        spectral_norm(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InputError, match="do not multiply"):
        spectral_norm(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(InputError, match="start has shape"):
        spectral_norm(torch.ones(200, 200), start=torch.ones(3))
    with pytest.raises(InputError, match="float64"):
        spectral_norm(torch.ones(200, 200), search=Search(tolerance=1e-7))
    for wrong in ({"tolerance": 0.0}, {"failure": 1.0}, {"at_most": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Search(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entry", [1e-42, 1e-30, 1e37])
@pytest.mark.parametrize("N", [40, 300])
def test_matrices_at_the_ends_of_float32(
    N: int, entry: float, dtype: torch.dtype
) -> None:
    """σ of a constant matrix is entry · N: no product may overflow or vanish."""
    a = torch.full((N, N), entry, dtype=dtype)
    found = spectral_norm(a)
    assert found.value == pytest.approx(float(a[0, 0]) * N, rel=1e-5, abs=0)
    assert found.lower <= float(a[0, 0]) * N <= found.upper


def test_bounds_are_rounded_outwards() -> None:
    for value, error in [(0.1, 1e-17), (3.0, 2.0**-53), (1.0, 0.1), (7e-5, 1e-9)]:
        found = Estimate(
            value=value, status=Status.EXACT, steps=0, residual=0.0, error=error
        )
        exact = Fraction(value) * Fraction(error)
        assert Fraction(found.lower) <= Fraction(value) - exact
        assert Fraction(found.upper) >= Fraction(value) + exact
