"""Every norm of the softmax Jacobian against autograd, brute force and 50 digits."""

from dataclasses import fields

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.softmax_norms import (
    SUPREMA,
    JacobianNorms,
    NormInterval,
    inf_to_two,
    softmax_jacobian_bracket,
    softmax_jacobian_norm,
    softmax_jacobian_norms,
    softmax_maximiser,
)
from tests.conftest import FLOATS, error_budget
from tests.oracles import softmax as oracle

NAMES = [field.name for field in fields(JacobianNorms)]
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])


def scores(seed: int, K: int, scale: float, N: int = 6) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(N, K, generator=rng, dtype=torch.float64)


def as_interval(value: Tensor | NormInterval) -> tuple[Tensor, Tensor]:
    return (
        (value.lower, value.upper)
        if isinstance(value, NormInterval)
        else (value, value)
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("K", [2, 3, 8, 14])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_every_norm_matches_autograd(
    dtype: torch.dtype, K: int, scale: float, device: torch.device
) -> None:
    p = scores(1, K, scale, N=3).softmax(-1).to(device, dtype)
    found = softmax_jacobian_norms(p)
    q = p.double().cpu()
    truth = oracle.norms((q / q.sum(-1, keepdim=True)).log().clamp(min=-700))
    # Rows are already rounded: what is left is a few operations in at least float32.
    budget = error_budget(found.entry.dtype, ops=4 * K + 16)
    for name in NAMES:
        lower, upper = (v.double().cpu() for v in as_interval(getattr(found, name)))
        assert (lower <= truth[name] + budget).all(), name
        assert (truth[name] <= upper + budget).all(), name
        if K <= 12 or name != "inf_to_two":
            assert (upper - lower <= budget).all(), name


@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0, 30.0, 60.0])
def test_spectral_norm_keeps_its_digits_on_saturated_rows(scale: float) -> None:
    for K in (2, 5, 17):
        p = scores(2, K, scale, N=2).softmax(-1)
        for dtype, ulps in ((torch.float64, 4), (torch.float32, 4)):
            rows = p.to(dtype)
            found = softmax_jacobian_norm(rows)
            for row, norm in zip(rows.tolist(), found.tolist(), strict=True):
                truth = oracle.largest_eigenvalue(row, digits=120)
                assert abs(norm - truth) <= ulps * torch.finfo(dtype).eps * truth


@pytest.mark.parametrize("name", NAMES)
def test_suprema_are_attained_and_not_exceeded(name: str) -> None:
    p = torch.cat([scores(3, 7, s, N=200).softmax(-1) for s in (0.1, 1.0, 3.0)])
    half = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0], dtype=torch.float64)
    lower, upper = as_interval(getattr(softmax_jacobian_norms(p), name))
    assert (upper <= SUPREMA[name] + 1e-12).all()
    if name == "nuclear":  # only in the limit of many keys
        uniform = torch.full((4096,), 1 / 4096, dtype=torch.float64)
        assert softmax_jacobian_norms(uniform).nuclear == pytest.approx(1 - 1 / 4096)
    else:
        lower, _ = as_interval(getattr(softmax_jacobian_norms(half), name))
        assert lower.item() == pytest.approx(SUPREMA[name], abs=1e-14)


@given(seeds, st.integers(13, 60), scales)
def test_inf_to_two_interval_holds_every_subset_tried(
    seed: int, K: int, scale: float
) -> None:
    p = scores(seed, K, scale).softmax(-1)
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (2000, K), generator=rng).double() * 2 - 1
    found = inf_to_two(p)
    images = p[:, None] * (signs - (p @ signs.T)[..., None])
    # The test's own form subtracts from 1, so it is only good to ε in absolute terms.
    tried = images.norm(dim=-1).amax(-1) - error_budget(p.dtype, ops=8)
    assert (tried <= found.upper).all()
    assert (found.lower <= found.upper).all()
    assert (found.exact == (found.upper - found.lower <= 3e-14)).all()


@given(seeds, st.integers(2, 9))
def test_a_key_with_half_the_mass_decides_inf_to_two(seed: int, K: int) -> None:
    p = scores(seed, K, 1.0).softmax(-1) * 0.49
    p = torch.cat([p, torch.full((6, 1), 0.51, dtype=torch.float64)], -1)
    top = torch.tensor([-1.0] * K + [1.0], dtype=torch.float64)
    alone = (p * (top - (p @ top)[:, None])).norm(dim=-1)
    torch.testing.assert_close(inf_to_two(p).upper, alone, rtol=1e-12, atol=0)
    truth = oracle.over_signs(oracle.jacobians(p.log()), 2)
    torch.testing.assert_close(alone, truth, rtol=1e-12, atol=0)


@given(seeds, st.integers(2, 40), scales)
def test_bracket_holds_and_is_within_two(seed: int, K: int, scale: float) -> None:
    p = scores(seed, K, scale).softmax(-1)
    low, high = softmax_jacobian_bracket(p)
    norm = softmax_jacobian_norm(p)
    slack = 1 + error_budget(p.dtype, ops=8)
    assert (low <= norm * slack).all()
    assert (norm <= high * slack).all()
    assert (high <= 2 * low * slack).all()


@given(seeds, st.integers(2, 30), scales)
def test_maximiser_is_an_eigenvector(seed: int, K: int, scale: float) -> None:
    p = scores(seed, K, scale).softmax(-1)
    norm, v = softmax_maximiser(p)
    image = p * (v - (p * v).sum(-1, keepdim=True))
    assert ((v.norm(dim=-1) - 1).abs() <= 1e-14).all()
    residual = (image - norm[:, None] * v).norm(dim=-1)
    assert (residual <= 1e-13).all()


@given(seeds, st.integers(2, 40), scales)
def test_masked_keys_and_order_do_not_matter(seed: int, K: int, scale: float) -> None:
    p = scores(seed, K, scale).softmax(-1)
    masked = torch.nn.functional.pad(p.flip(-1), (2, 3))
    torch.testing.assert_close(
        softmax_jacobian_norm(masked), softmax_jacobian_norm(p), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param([1.0, 0.0, 0.0], 0.0, id="one-hot"),
        pytest.param([0.25] * 4, 0.25, id="uniform"),
        pytest.param([0.5, 0.5, 0.0], 0.5, id="two-way tie is the worst case"),
        pytest.param([0.75, 0.25], 0.375, id="two keys: 2p(1-p)"),
        pytest.param([1.0], 0.0, id="single key"),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_known_rows(row: list[float], expected: float, dtype: torch.dtype) -> None:
    norm = softmax_jacobian_norm(torch.tensor(row, dtype=dtype))
    assert norm.item() == pytest.approx(expected, rel=error_budget(norm.dtype, ops=4))


def test_a_saturated_float32_row_is_not_read_as_zero() -> None:
    row = torch.tensor([1.0, 3e-20, 1e-20, 0.0])
    assert softmax_jacobian_norm(row) == pytest.approx(
        float(oracle.largest_eigenvalue(row.tolist(), digits=80)), rel=1e-6
    )
    assert softmax_jacobian_norms(row).entry == pytest.approx(4e-20, rel=1e-6)


@pytest.mark.parametrize(
    "row", [[float("nan"), 0.5, 0.5], [0.0, 0.0], [-0.1, 0.6, 0.5], [0.7, 0.7]]
)
def test_a_broken_row_reads_nan_and_its_neighbour_does_not(row: list[float]) -> None:
    good = [1.0] + [0.0] * (len(row) - 1)
    found = softmax_jacobian_norms(torch.tensor([row, good]))
    for name in NAMES:
        for bound in as_interval(getattr(found, name)):
            assert bound[0].isnan(), name
            assert not bound[1].isnan(), name


def test_temperature_divides_and_must_be_positive() -> None:
    p = torch.tensor([0.6, 0.4])
    cold = softmax_jacobian_norms(p, temperature=0.5)
    assert cold.spectral == 2 * softmax_jacobian_norms(p).spectral
    with pytest.raises(InputError, match="temperature"):
        softmax_jacobian_norms(p, temperature=0.0)
