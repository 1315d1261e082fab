"""κ_LN, r_ε, ρ̃_LN and range use, against running the norm in low precision."""

import math

import pytest
import torch

from equipoise.numerics.formats import FORMATS
from equipoise.numerics.fragility import epsilon_stored, norm_condition, range_use
from equipoise.numerics.rounding import PIECE, rounded


def test_known_points() -> None:
    x = torch.tensor([[1.0, -1.0], [101.0, 99.0], [5.0, 5.0]])
    found = norm_condition(x, eps=1.0, statistics=FORMATS["fp32"])
    assert found.cancellation.tolist() == pytest.approx([1.0, 100.005, math.inf])
    assert found.epsilon_share.tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert found.statistics_error.tolist() == pytest.approx([2**-24, 2**-24, 0.0])


def test_rms_norm_has_nothing_to_cancel(rng: torch.Generator) -> None:
    x = torch.randn(5, 32, generator=rng) + 100
    found = norm_condition(x, eps=1e-6, statistics=FORMATS["fp32"], centred=False)
    torch.testing.assert_close(found.cancellation, torch.ones(5))


@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("eps", [1e-12, 1e-2])
def test_cancellation_is_how_input_rounding_grows(
    offset: float, eps: float, rng: torch.Generator
) -> None:
    x = torch.randn(64, 256, generator=rng, dtype=torch.float64) + offset
    fmt = FORMATS["bf16"]
    norm = torch.nn.functional.layer_norm
    exact = norm(x, (256,), eps=eps)
    moved = norm(rounded(x, fmt), (256,), eps=eps)
    seen = (moved - exact).norm() / exact.norm()
    kappa = (
        norm_condition(x, eps=eps, statistics=fmt).cancellation.square().mean().sqrt()
    )
    # A rounding moves x by between u/√12 and u/√3 of itself, in the mean square.
    assert 0.28 * fmt.unit_roundoff <= seen / kappa <= 0.6 * fmt.unit_roundoff


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_broken_tokens(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -1.0], [math.nan, 1.0]], dtype=dtype)
    found = norm_condition(x, eps=1e-5, statistics=FORMATS["fp32"])
    assert found.cancellation[0] == 1
    assert found.cancellation[1].isnan() and found.epsilon_share[1].isnan()


def test_epsilon_in_half_precision() -> None:
    assert epsilon_stored(1e-8, FORMATS["fp16"]) == 0
    assert epsilon_stored(1e-5, FORMATS["fp16"]) == pytest.approx(1.00136e-5, rel=1e-5)
    assert epsilon_stored(1e-5, FORMATS["bf16"]) == pytest.approx(1e-5, rel=2**-8)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_range_shares_count_what_rounding_does(name: str, rng: torch.Generator) -> None:
    fmt = FORMATS[name]
    x = (
        torch.randn(4000, generator=rng)
        * (40 * torch.rand(4000, generator=rng) - 25).exp2()
    )
    use, near = range_use(x, fmt), rounded(x, fmt)
    assert use.flushed == (near == 0).double().mean().item()
    out = near.isinf() if fmt.overflow == "inf" else x.abs() > fmt.largest
    assert use.overflow == out.double().mean().item()
    assert use.flushed <= use.subnormal


def test_shares_are_of_the_full_tensor_not_of_a_piece(rng: torch.Generator) -> None:
    """Pieces within the range are counted at sight, the others entry by entry."""
    x = torch.ones(3 * PIECE + 5, dtype=torch.float64)
    x[PIECE + 1], x[PIECE + 2], x[2 * PIECE], x[-1] = 1e-6, 1e-9, 1e6, math.nan
    use, count = range_use(x.flip(0), FORMATS["fp16"]), len(x) - 1
    assert use.overflow == 1 / count
    assert (use.subnormal, use.flushed) == (2 / count, 1 / count)


def test_nothing_to_range_over_is_nan() -> None:
    use = range_use(torch.tensor([0.0, -math.inf]), FORMATS["fp16"])
    assert math.isnan(use.overflow) and math.isnan(use.flushed)
