"""θ as a certified interval: against brute force, known points, broken rows."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import equipoise
from equipoise.errors import InputError
from equipoise.numerics.rows.balance import MASS_TOLERANCE, balance, warm_up
from tests.conftest import FLOATS, error_budget
from tests.oracles import balance as oracle

families = st.sampled_from(sorted(oracle.FAMILIES))
seeds = st.integers(0, 2**32 - 1)
# Both sides are sums of up to 20 float64 in some order, then four more roundings.
BUDGET = 24 * 2.0**-52


def drawn(family: str, seed: int, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(oracle.rows(family, np.random.default_rng(seed), shape))


def attained(p: Tensor, mask: Tensor) -> Tensor:
    """Return θ of the given subset, both sides summed in float64."""
    wide = p.double()
    inside, outside = (wide * mask).sum(-1), (wide * ~mask).sum(-1)
    return 4 * inside * outside / (inside + outside) ** 2


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8, 11, 14])
def test_brute_force_agrees(family: str, K: int) -> None:
    p = drawn(family, K, (24, K))
    truth = torch.from_numpy(oracle.theta(p.numpy()))
    found = balance(p, witness=True)
    assert found.exact.all()
    assert found.witness is not None
    for bound in (found.lower, found.upper, attained(p, found.witness)):
        torch.testing.assert_close(bound, truth, rtol=BUDGET, atol=0)


@pytest.mark.parametrize("name", oracle.DEFEATS)
def test_rows_that_defeat_one_step(name: str) -> None:
    p = oracle.normalised(np.array([oracle.DEFEATS[name]]))
    found = balance(torch.from_numpy(p))
    assert found.exact.item()
    assert found.lower.item() == pytest.approx(oracle.theta(p).item(), abs=BUDGET)


@settings(max_examples=60)
@given(families, seeds, st.integers(2, 12), st.sampled_from(FLOATS))
def test_below_eight_ninths_one_key_holds_more_than_half(
    family: str, seed: int, K: int, dtype: torch.dtype
) -> None:
    """And its weight alone gives θ; three equal keys attain 8/9."""
    p = drawn(family, seed, (4, K)).to(dtype)
    found, wide = balance(p), p.double() / p.double().sum(-1, keepdim=True)
    room = error_budget(dtype, ops=K) + BUDGET
    top = wide.amax(-1)
    least = torch.where(top > 0.5, 4 * top * (1 - top), 8 / 9)
    assert (found.lower.double() >= least - room).all()
    assert (found.upper.double() <= torch.where(top > 0.5, least, 1.0) + room).all()
    thirds = torch.full((3,), 1 / 3, dtype=dtype)
    assert float(balance(thirds).upper) == pytest.approx(8 / 9, abs=1e-2)


@settings(max_examples=60)
@given(families, seeds, st.integers(2, 12), st.sampled_from([0.5, 1.0, 3.0]))
def test_is_the_jacobian_norm_from_infinity_to_one(
    family: str, seed: int, K: int, temperature: float
) -> None:
    z = drawn(family, seed, (2, K)).clamp(min=1e-30).log()
    norm = oracle.infinity_to_one(z, temperature)
    p = (z / temperature).softmax(-1)
    torch.testing.assert_close(
        balance(p).lower / temperature, norm, rtol=0, atol=K * BUDGET
    )


@settings(max_examples=100)
@given(families, seeds, st.integers(1, 200), st.sampled_from(FLOATS))
def test_the_interval_is_attained_and_ordered(
    family: str, seed: int, K: int, dtype: torch.dtype
) -> None:
    p = drawn(family, seed, (3, K)).to(dtype)
    p = torch.where((p.double().sum(-1, True) - 1).abs() < 2**-7, p, 1 / K)
    found = balance(p, witness=True)
    assert found.witness is not None
    sound = ~found.lower.isnan()
    theta = attained(p, found.witness)[sound]
    slack = error_budget(found.lower.dtype, ops=4)
    assert (found.lower[sound] <= theta * (1 + slack)).all()
    assert (theta <= found.upper[sound] * (1 + slack)).all()
    assert (found.upper[sound] <= 1).all()
    assert (found.lower[sound] >= 0).all()
    assert not (found.witness & (p == 0)).any()


@settings(max_examples=60)
@given(families, seeds, st.integers(2, 60))
def test_neither_order_nor_masked_keys_matter(family: str, seed: int, K: int) -> None:
    p = drawn(family, seed, (2, K))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(K + 3))
    moved = torch.nn.functional.pad(p, (0, 3))[:, order]
    a, b = balance(p), balance(moved)
    ok = a.exact & b.exact & ~a.lower.isnan()
    torch.testing.assert_close(a.lower[ok], b.lower[ok], rtol=BUDGET, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("K", [1, 2, 3, 31, 32, 33, 64, 100, 101, 1023, 1024])
def test_uniform_rows(K: int, dtype: torch.dtype) -> None:
    """Cor. 4.3: 1 for even K, 1 - 1/K² for odd."""
    found = balance(torch.full((K,), 1 / K, dtype=dtype))
    expected = 1.0 if K % 2 == 0 else 1 - 1 / K**2
    eps = torch.finfo(found.lower.dtype).eps
    assert found.exact.item()
    assert found.lower.item() == pytest.approx(expected, rel=eps, abs=0)
    assert found.upper.item() == pytest.approx(expected, rel=eps, abs=0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param([0.4, 0.1, 0.4, 0.1], 1.0, id="the paper's example"),
        pytest.param([1.0, 0.0, 0.0], 0.0, id="one-hot"),
        pytest.param([1.0], 0.0, id="single key"),
        pytest.param([0.5, 0.5], 1.0, id="two equal keys"),
        pytest.param([0.75, 0.25], 0.75, id="two keys"),
        pytest.param([1 - 2.0**-40, 2.0**-40], 2.0**-38 * (1 - 2.0**-40), id="peaked"),
        pytest.param([1.0, 1e-300], 4e-300, id="4p(1-p) would say 0"),
        pytest.param([1.0, 5e-324], 2e-323, id="subnormal"),
    ],
)
def test_known_rows(row: list[float], expected: float) -> None:
    found = balance(torch.tensor(row, dtype=torch.float64))
    assert found.exact.item()
    assert found.lower.item() == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([float("nan"), 0.5, 0.5], id="NaN"),
        pytest.param([-0.1, 0.6, 0.5], id="negative"),
        pytest.param([float("inf"), 0.0, 0.0], id="infinite"),
        pytest.param([0.0, 0.0, 0.0], id="no mass"),
        pytest.param([0.5, 0.5, 0.5], id="too much mass"),
        pytest.param([0.3, 0.3, 0.3], id="too little mass"),
    ],
)
@pytest.mark.parametrize("K", [3, 70])
def test_a_broken_row_reads_nan_and_its_neighbours_do_not(
    row: list[float], K: int, dtype: torch.dtype
) -> None:
    broken = torch.nn.functional.pad(torch.tensor(row, dtype=dtype), (0, K - 3))
    even = torch.full((K,), 1 / K, dtype=dtype)
    p = torch.stack([even, broken, torch.eye(K, dtype=dtype)[0]])
    found = balance(p, witness=True)
    assert found.lower.isnan().tolist() == [False, True, False]
    assert found.upper.isnan().tolist() == [False, True, False]
    assert found.exact.tolist() == [True, False, True]
    assert found.witness is not None
    assert not found.witness[1].any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("K", [4, 64])
def test_the_sum_may_be_off_by_a_sixteenth(K: int, dtype: torch.dtype) -> None:
    p = torch.full((3, K), 1 / K, dtype=dtype)
    p[0, 0] += MASS_TOLERANCE * 0.9
    p[1, 0] += MASS_TOLERANCE * 1.2
    p[2] *= 1 - 1.2 * MASS_TOLERANCE
    with pytest.warns(UserWarning, match=r"2 of 3 rows read NaN: .* more than 0\.0625"):
        assert balance(p).lower.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["bfloat16 as float32", "float32 as float64"])
def test_rows_rounded_before_they_were_widened_are_read(name: str) -> None:
    """θ divides by (Σp)²: what an earlier dtype rounded away is no reason for NaN."""
    p = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
    given = p.bfloat16().float() if name.startswith("bf") else p.double()
    found = balance(given)
    assert not found.lower.isnan().any()
    wide = given.double() / given.double().sum(-1, keepdim=True)
    torch.testing.assert_close(
        found.lower.double(), balance(wide).lower, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_no_keys_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="at least one key"):
        balance(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_the_wrong_dtype_is_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"p\.float\(\)"):
        balance(torch.ones(2, 1, dtype=dtype))


def test_shapes_strides_and_gradients() -> None:
    p = torch.randn(5, 40, 3, requires_grad=True).softmax(1)
    strided = p.transpose(1, 2)
    found = balance(strided, witness=True)
    assert found.lower.shape == (5, 3)
    assert found.witness is not None
    assert found.witness.shape == (5, 3, 40)
    assert not found.lower.requires_grad
    again = balance(strided.contiguous(), witness=True)  # the same steps, bit for bit
    assert torch.equal(found.lower, again.lower)
    turned = torch.randn(40, 6).softmax(0).T
    mask = balance(turned, witness=True).witness
    assert torch.equal(mask, balance(turned.contiguous(), witness=True).witness)
    assert balance(torch.empty(0, 4, 7)).lower.shape == (0, 4)
    assert balance(torch.full((8,), 1 / 8)).lower.shape == ()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_dtype_of_the_answer(dtype: torch.dtype) -> None:
    found = balance(torch.tensor([0.75, 0.25], dtype=dtype))
    assert found.lower.dtype == torch.promote_types(dtype, torch.float32)
    assert found.upper.dtype == found.lower.dtype


def test_a_negative_zero_is_a_masked_key() -> None:
    p = torch.full((64,), 1 / 32)
    p[::2] = -0.0
    assert balance(p).lower.item() == 1.0


@pytest.mark.parametrize("scale", [0.001, 0.1, 0.5, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("K", [48, 300, 1024, 20_000])
def test_long_rows_are_closed(scale: float, K: int, rng: torch.Generator) -> None:
    p = (scale * torch.randn(8, K, generator=rng)).softmax(-1)
    found = balance(p, witness=True)
    assert found.exact.all()
    assert found.witness is not None
    reached = attained(p, found.witness)
    assert (found.lower <= reached * (1 + K * 2.0**-52)).all()  # sums in other orders
    torch.testing.assert_close(found.lower.double(), reached, rtol=0, atol=2**-23)


def test_the_surface() -> None:
    warm_up()
    assert equipoise.balance is balance
    assert equipoise.Balance is type(balance(torch.ones(1)))


def test_effort_bounds_the_search_and_leaves_an_interval() -> None:
    """33 comparable float64 keys: 2³³ subsets, and only a search finds the best."""
    p = drawn("scores × 0.5", 0, (4, 33))
    none, some, most = (balance(p, effort=effort) for effort in (0, 1, 50))
    for less, more in ((none, some), (some, most)):
        assert (less.lower <= more.lower).all() and (more.upper <= less.upper).all()
    assert not none.exact.any() and most.exact.all()
    with pytest.raises(InputError, match="effort must be a number from 0 on"):
        balance(p, effort=-1)
