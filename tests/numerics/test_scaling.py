"""Depth rules against what they promise."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise.numerics.scaling import (
    PATH_LENGTH,
    common_gain,
    deepnorm,
    deepnorm_encoder_decoder,
    deepnorm_original,
    initial_std,
    output_gain,
    path_gain,
)

depths = st.integers(1, 2000)


@given(depths, st.sampled_from(sorted(PATH_LENGTH.values())))
def test_the_maps_of_a_path_multiply_to_one_over_depth(N: int, m: int) -> None:
    assert path_gain(N, maps=m) ** m == pytest.approx(1 / N)


@given(depths, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6))
def test_unequal_norms_share_one_over_depth(N: int, norms: list[float]) -> None:
    gain = common_gain(N, norms)
    assert math.prod(gain * norm for norm in norms) == pytest.approx(1 / N)


@given(depths)
def test_equal_norms_need_the_path_gain(N: int) -> None:
    assert common_gain(N, [1.0] * 4) == pytest.approx(path_gain(N, maps=4))


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_both_forms_of_deepnorm_are_one_layer(N: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, f = torch.randn(2, 16, generator=rng, dtype=torch.float64)
    ours, theirs = deepnorm(N), deepnorm_original(N)
    paper = F.layer_norm(ours.skip * x + ours.branch * f, (16,), eps=0.0)
    original = F.layer_norm(theirs.skip * x + theirs.branch * f, (16,), eps=0.0)
    torch.testing.assert_close(paper, original, rtol=0, atol=1e-12)
    assert ours.gain == theirs.gain


def test_deepnorm_as_published() -> None:
    """Wang et al. 2022: values worked out by hand from their table."""
    assert deepnorm_original(100).skip == pytest.approx(3.7606, abs=1e-4)
    assert deepnorm_original(100).gain == pytest.approx(0.18803, abs=1e-5)
    encoder, decoder = deepnorm_encoder_decoder(
        16, 27
    )  # unequal: stacks may be mixed up
    assert encoder.skip == pytest.approx(0.81 * 2 * 27 ** (1 / 16))
    assert encoder.gain == pytest.approx(0.87 / 2 * 27 ** (-1 / 16))
    assert decoder.skip == pytest.approx(3.0)
    assert decoder.gain == pytest.approx(18**-0.5)


@pytest.mark.parametrize("width", [64, 256])
def test_initial_std_keeps_the_operator_norm(width: int) -> None:
    rng = torch.Generator().manual_seed(0)
    matrix = initial_std(width) * torch.randn(width, width, generator=rng)
    assert torch.linalg.matrix_norm(matrix, ord=2) == pytest.approx(1.43, rel=0.08)


def test_branches_of_equal_variance_add_up_to_one() -> None:
    assert 2 * 24 * output_gain(24) ** 2 == pytest.approx(1.0)


def test_what_cannot_be_scaled() -> None:
    for wrong in (path_gain, deepnorm, deepnorm_original, output_gain):
        with pytest.raises(InputError, match="depth 0"):
            wrong(0)
    with pytest.raises(InputError, match="maps 0"):
        path_gain(3, maps=0)
    with pytest.raises(InputError, match="width"):
        initial_std(0)
    for norms in ([], [1.0, 0.0], [1.0, math.inf], [-1.0], [math.nan]):
        with pytest.raises(InputError, match="norms"):
            common_gain(3, norms)
