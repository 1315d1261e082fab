"""θ beside a learned sink, against the Jacobian of autograd over every sign vector."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from equipoise.numerics.rows.sinks import KEY_MASS, SINK_LOGIT, key_columns
from equipoise.numerics.rows.statistics import (
    COLUMNS,
    ENTROPY,
    LOWER,
    MAX_LOGIT,
    SINK,
    TOP_MASS,
    UPPER,
    row_columns,
)


def truth(z_K: Tensor, sink: float) -> float:
    """Return max over x = ±1 of ‖∂(masses of the keys)/∂(scores of the keys) x‖₁."""
    fixed = torch.tensor([sink], dtype=torch.float64)

    def masses(z: Tensor) -> Tensor:
        return torch.cat((z, fixed)).softmax(-1)[:-1]

    J_KK = torch.autograd.functional.jacobian(masses, z_K.double())
    signs = itertools.product((-1.0, 1.0), repeat=len(z_K))
    x_SK = torch.tensor(list(signs), dtype=torch.float64)
    return (x_SK @ J_KK.mT).abs().sum(-1).max().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", [-30.0, -1.0, 0.0, 2.0, 12.0])
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_theta_is_the_norm_of_the_jacobian_of_the_keys(
    spread: float, sink: float, dtype: torch.dtype
) -> None:
    z_NK = (torch.randn(6, 9) * spread).to(dtype)
    whole = torch.cat((z_NK, torch.full((6, 1), sink, dtype=dtype)), -1)
    read_CN = key_columns(whole, sinks=1)
    for row, z_K in enumerate(z_NK):
        expected = truth(z_K, sink)
        near = 2e-6 * max(expected, 1e-6)
        assert read_CN[LOWER, row].item() <= expected + near
        assert read_CN[UPPER, row].item() >= expected - near
        width = read_CN[UPPER, row] - read_CN[LOWER, row]
        assert width.item() <= 2e-6


def test_a_sink_read_as_a_key_would_be_too_sensitive() -> None:
    even = torch.zeros(1, 2)
    as_key = row_columns(torch.cat((even, torch.full((1, 1), math.log(2))), -1))
    beside = key_columns(
        torch.cat((even, torch.full((1, 1), math.log(2))), -1), sinks=1
    )
    assert as_key[LOWER].item() == pytest.approx(1.0)
    assert beside[LOWER].item() == pytest.approx(0.5)


def test_the_other_columns() -> None:
    z = torch.randn(4, 7)
    whole = torch.cat((z, torch.randn(4, 2)), -1)
    read, p = key_columns(whole, sinks=2), whole.double().softmax(-1)
    mass = p[:, :7].sum(-1)
    keys = p[:, :7] / mass[:, None]
    expected = {
        KEY_MASS: mass,
        SINK_LOGIT: whole[:, 7:].double().logsumexp(-1),
        SINK: p[:, 0],
        TOP_MASS: p[:, :7].amax(-1),
        MAX_LOGIT: z.double().amax(-1),
        ENTROPY: -(keys * keys.log()).sum(-1),
    }
    for column, value in expected.items():
        torch.testing.assert_close(read[column].double(), value, rtol=2e-6, atol=1e-6)


def test_edges() -> None:
    hidden = torch.tensor([[-torch.inf, -torch.inf, 0.5], [1.0, -torch.inf, 0.5]])
    read = key_columns(hidden, sinks=1)
    assert read[LOWER].tolist() == [0, 0] and read[KEY_MASS, 0].item() == 0
    assert read[KEY_MASS, 1].item() == pytest.approx(1 / (1 + math.exp(-0.5)))
    broken = torch.tensor([[1.0, torch.nan, 0.0], [1.0, 0.0, torch.nan]])
    assert key_columns(broken, sinks=1)[[LOWER, UPPER]].isnan().all()
    without = torch.randn(3, 5)
    assert key_columns(without, sinks=0).shape == (COLUMNS, 3)
    torch.testing.assert_close(key_columns(without, sinks=0), row_columns(without))
    off = torch.cat((without, torch.full((3, 1), -torch.inf)), -1)
    torch.testing.assert_close(
        key_columns(off, sinks=1)[LOWER], row_columns(without)[LOWER]
    )
