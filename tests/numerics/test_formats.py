"""Rounding is exact: against exhaustive search, torch's casts, and its own laws."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS, Format, format_named
from equipoise.numerics.rounding import (
    PIECE,
    power_of_two_scale,
    rounded,
    rounding_variance,
    stochastically_rounded,
    ulp,
)
from tests.oracles import formats as oracle

EIGHT_BITS = ["e4m3", "e5m2", "e3m4", "e2m5", "e6m1"]
ALL_FINITE = Format(name="all finite", significand=4, exponent=4, finite_only=True)
WIDE = [torch.float32, torch.float64]
NATIVE = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def every_neighbourhood(format: Format, dtype: torch.dtype) -> list[float]:
    """Return each number of the format, each midpoint, and both sides of each."""
    grid = [float(x) for x in oracle.numbers(format)]
    step = grid[-1] - grid[-2]
    points = [*grid, grid[-1] + step]
    middles = [(a + b) / 2 for a, b in zip(points, points[1:], strict=False)]
    near = torch.tensor(points + middles, dtype=dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-1.0, dtype=dtype)
    around = torch.cat([near, near.nextafter(up), near.nextafter(down)])
    return torch.cat([around, -around]).tolist()


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(
    "format", [*map(format_named, EIGHT_BITS), ALL_FINITE], ids=lambda f: f.name
)
def test_exhaustive_for_eight_bits(format: Format, dtype: torch.dtype) -> None:
    grid = oracle.numbers(format)
    values = every_neighbourhood(format, dtype)
    found = rounded(torch.tensor(values, dtype=dtype), format).tolist()
    beyond = format.largest if format.overflow == "saturate" else math.inf
    for x, y in zip(values, found, strict=True):
        expected = oracle.nearest(x, grid)
        size = beyond if expected is None else float(expected)
        assert y == math.copysign(size, x), (x, y, size)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_code_of_the_format_rounds_to_itself(name: str) -> None:
    format = format_named(name)
    codes = torch.tensor([float(x) for x in oracle.numbers(format)])
    assert codes[-1].item() == format.largest
    assert codes[1].item() == format.smallest_subnormal
    assert torch.equal(rounded(codes, format), codes)
    assert torch.equal(rounding_variance(codes, format), torch.zeros_like(codes))


@pytest.mark.parametrize("name", NATIVE)
def test_agrees_with_torch_casts(name: str, rng: torch.Generator) -> None:
    # fp8 in torch saturates or not depending on the release: stay inside its range.
    exponents = 40 * torch.rand(50_000, generator=rng) - 28
    x = torch.randn(50_000, generator=rng) * exponents.exp2()
    x = x[x.abs() <= FORMATS[name].largest]
    cast = x.to(NATIVE[name]).float()
    assert torch.equal(rounded(x, FORMATS[name]), cast)
    assert torch.equal(rounded(x.double(), FORMATS[name]), cast.double())


def test_a_float64_is_rounded_once() -> None:
    x = torch.tensor([1 + 2**-11 + 2**-30], dtype=torch.float64)
    assert rounded(x, FORMATS["fp16"]).item() == 1 + 2**-10
    assert x.half().item() == 1.0  # what torch does: down to a tie, then to even


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_large_tensors_are_rounded_as_their_entries(
    name: str, rng: torch.Generator
) -> None:
    """By pieces, in torch's kernels while they hold float32's numbers."""
    x = torch.randn(4, PIECE, generator=rng).double()
    x[1, 7], x[2, :3] = 1e300, torch.tensor([math.nan, -math.inf, 0.0])
    x[3, 0] = 1 + 2.0**-8 + 2.0**-40  # one rounding goes up, two go down
    x[3, 1] = 1 + 2.0**-11 + 2.0**-40
    near = torch.cat([rounded(row, FORMATS[name]) for row in x])
    found = rounded(x, FORMATS[name]).flatten()
    torch.testing.assert_close(found, near, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "e4m3", "e5m2", "e6m9"])
@pytest.mark.parametrize("dtype", WIDE)
@given(x=st.floats(allow_nan=False, width=32))
def test_laws(name: str, dtype: torch.dtype, x: float) -> None:
    format = format_named(name)
    wide = torch.tensor([x], dtype=dtype)
    once = rounded(wide, format)
    assert torch.equal(rounded(once, format), once)
    assert torch.equal(rounded(-wide, format), -once)
    if abs(x) <= format.largest:
        half_step = ulp(wide, format) / 2
        bound = torch.maximum(
            half_step, torch.tensor(format.smallest_subnormal / 2, dtype=dtype)
        )
        assert (once - wide).abs() <= bound


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "e5m2"])
def test_numbers_of_the_formats(name: str) -> None:
    format, info = FORMATS[name], torch.finfo(NATIVE.get(name, torch.float32))
    if name != "tf32":
        assert format.spacing == info.eps
        assert format.largest == info.max
    assert format.smallest_normal == info.smallest_normal
    assert format.unit_roundoff == format.spacing / 2


def test_e4m3_gives_one_code_to_nan() -> None:
    assert FORMATS["e4m3"].largest == 448.0
    assert FORMATS["e4m3"].smallest_subnormal == 2**-9


def test_epsilons_below_the_format() -> None:
    eps = torch.tensor([1e-5, 1e-6, 1e-8])
    stored = rounded(eps, FORMATS["fp16"])
    assert stored.tolist() == pytest.approx([1.00136e-5, 1.0133e-6, 0.0], rel=1e-4)


@pytest.mark.parametrize("dtype", WIDE)
def test_broken_numbers_stay_broken(dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    for name in ("fp16", "bf16", "tf32", "e5m2"):
        assert rounded(x, FORMATS[name]).tolist()[1:] == [math.inf, -math.inf]
        assert rounded(x, FORMATS[name])[0].isnan()
    assert rounded(x, FORMATS["e4m3"]).tolist()[1:] == [448.0, -448.0]
    assert rounded(x, FORMATS["e4m3"])[0].isnan()
    assert rounding_variance(x, FORMATS["fp16"]).tolist()[1:] == [0.0, 0.0]
    assert rounding_variance(x, FORMATS["fp16"])[0].isnan()


def test_saturation_on_request() -> None:
    x = torch.tensor([1e6, -1e6])
    assert rounded(x, FORMATS["fp16"]).tolist() == [math.inf, -math.inf]
    assert rounded(x, FORMATS["fp16"], saturate=True).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2"])
def test_variance_is_a_twelfth_of_ulp_squared(name: str, rng: torch.Generator) -> None:
    x = 1 + torch.rand(200_000, generator=rng, dtype=torch.float64)
    mean = rounding_variance(x, FORMATS[name]).mean()
    # 200 000 draws: the mean of w fluctuates by 0.2 %; 1 % is five deviations.
    assert mean.item() == pytest.approx(FORMATS[name].spacing ** 2 / 12, rel=1e-2)


@pytest.mark.parametrize("name", ["fp16", "e4m3", "e5m2"])
def test_stochastic_rounding_is_unbiased(name: str, rng: torch.Generator) -> None:
    format = FORMATS[name]
    points = torch.tensor([1.01, -2.3, 0.7 * format.smallest_subnormal, 3.0, 0.0])
    x = points.repeat(40_000, 1)
    y = stochastically_rounded(x, format, generator=rng)
    assert torch.equal(rounded(y, format), y)
    assert ((y - x).abs() <= ulp(x, format)).all()
    spread = ulp(points, format) / 2 / 40_000**0.5  # at most half a step, over √n
    assert ((y.mean(0) - points).abs() <= 5 * spread + 1e-7).all()
    assert torch.equal(y[:, 3], x[:, 3])


def test_scale_brings_the_largest_just_inside() -> None:
    for top in (3e-5, 1.0, 449.0, 1e6):
        x = torch.tensor([top, -top / 3])
        scale = power_of_two_scale(x, FORMATS["e4m3"])
        assert math.log2(scale).is_integer()
        assert 224 <= top * scale <= 448
    assert power_of_two_scale(torch.zeros(2), FORMATS["e4m3"]) == 1.0


def test_errors() -> None:
    with pytest.raises(InputError, match="unknown format 'int8'"):
        format_named("int8")
    with pytest.raises(InputError, match="needs 2-53 significand"):
        format_named("e5m0")
    with pytest.raises(InputError, match="widen it first"):
        rounded(torch.ones(1, dtype=torch.float16), FORMATS["e4m3"])
    with pytest.raises(InputError, match="cannot hold fp64"):
        rounded(torch.ones(1), FORMATS["fp64"])
    x = torch.rand(3)
    assert rounded(x, FORMATS["fp32"]) is x
