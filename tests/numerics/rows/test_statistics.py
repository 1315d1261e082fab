"""Statistics of rows of scores: against float64 softmax, and on rows that are odd."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.errors import InputError
from equipoise.numerics.rows import statistics as attention_rows
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.statistics import (
    RowStatistics,
    row_columns,
    row_statistics,
    warm_up,
)
from equipoise.numerics.rows.window import _KEYS, _gathered
from tests.conftest import FLOATS

INF = float("inf")
NAN = float("nan")


def scores(scale: float, L: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(L)
    z = scale * torch.randn(2, L, L, generator=rng, dtype=torch.float64)
    return z.masked_fill(torch.ones(L, L).triu(1).bool(), -INF).to(dtype)


def reference(z: Tensor) -> dict[str, Tensor]:
    p = z.double().softmax(-1)
    found = balance(p)
    return {
        "theta_lower": found.lower,
        "theta_upper": found.upper,
        "max_logit": z.double().amax(-1),
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "sink": p[..., 0],
        "p_max": p.amax(-1),
        "visible": (z > -INF).sum(-1).double(),
    }


def assert_reads(read: RowStatistics, expected: dict[str, Tensor], atol: float) -> None:
    for name, value in expected.items():
        got = getattr(read, name).double()
        torch.testing.assert_close(got, value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5, 2.0, 5.0, 30.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reads_what_float64_softmax_reads(scale: float, dtype: torch.dtype) -> None:
    """Scores up to 100 in float32 are off by at most 2⁻¹⁸; so is their exponential."""
    z = scores(scale, dtype=dtype)
    assert_reads(row_statistics(z), reference(z), atol=4e-6)


@pytest.mark.parametrize(("K", "widest"), [(17, 2e-3), (33, 2e-4), (257, 1e-6)])
def test_what_stays_open_unsorted_is_narrow(K: int, widest: float) -> None:
    """Nearly uniform rows are the hardest; docs/quantities/theta.md says how wide."""
    rng = torch.Generator().manual_seed(K)
    z = 0.1 * torch.randn(1000, K, generator=rng)
    lower, upper = row_columns(z)[:2]
    assert (upper - lower).max() <= widest
    assert (balance(z.softmax(-1)).lower <= upper + 1e-6).all()


@pytest.mark.parametrize("scale", [0.0, 0.5, 5.0])
def test_the_torch_path_reads_the_same(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "COMPILED", False)
    z = scores(scale, L=40)
    expected = reference(z)
    truth = expected.pop("theta_lower"), expected.pop("theta_upper")
    read = row_statistics(z)
    assert_reads(read, expected, atol=1e-6)
    assert (read.theta_lower <= truth[0] + 1e-6).all()
    assert (truth[1] <= read.theta_upper + 1e-6).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("K", [4, 80])
def test_odd_rows(K: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_rows, "COMPILED", compiled)
    z = torch.full((6, K), -INF)
    z[1, 2] = 7.0
    z[2, :3] = torch.tensor([NAN, 0.0, 0.0])
    z[3, :3] = torch.tensor([0.0, INF, 0.0])
    z[4, :2] = torch.tensor([200.0, -200.0])
    z[5, :2] = -1e38
    read = row_statistics(z)
    assert read.counted.tolist() == [False, False, True, True, True, True]
    assert read.visible.tolist()[:2] == [0, 1]
    assert read.theta_lower.isnan().tolist() == [False, False, True, True, False, False]
    assert read.entropy.isnan().tolist() == [False, False, True, True, False, False]
    assert read.theta_lower[[0, 1, 4, 5]].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert read.theta_upper[[0, 1, 4, 5]].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert read.max_logit[[0, 1, 4]].tolist() == [-INF, 7.0, 200.0]
    assert read.p_max[[0, 1]].tolist() == [0.0, 1.0]
    assert read.sink[[0, 1, 4, 5]].tolist() == [0.0, 0.0, 1.0, 0.5]
    assert read.entropy[[0, 1, 4]].tolist() == [0.0, 0.0, 0.0]


def test_a_negative_nan_is_a_nan_too() -> None:
    z = torch.zeros(2, 50)
    z[1, 40] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)
    assert row_statistics(z).max_logit.isnan().tolist() == [False, True]


def test_masks_need_not_be_causal(rng: torch.Generator) -> None:
    z = torch.randn(64, 70, generator=rng)
    z = z.masked_fill(torch.rand(64, 70, generator=rng) < 0.7, -INF)
    assert_reads(row_statistics(z), reference(z), atol=2e-6)


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "_local_scalar_dense" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [True, False])
def test_never_synchronises_nor_draws(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "COMPILED", compiled)
    z = scores(1.0).requires_grad_()
    state = torch.get_rng_state()
    with NoSync():
        read = row_statistics(z)
    assert torch.equal(state, torch.get_rng_state())
    assert not read.theta_lower.requires_grad


def test_shapes_and_strides() -> None:
    z = scores(1.0, L=40).view(1, 2, 40, 40)
    read = row_statistics(z.mT)
    assert read.theta_lower.shape == (1, 2, 40)
    assert torch.equal(read.entropy, row_statistics(z.mT.contiguous()).entropy)
    assert row_statistics(torch.empty(0, 3, 5)).visible.shape == (0, 3)
    warm_up()


@pytest.mark.parametrize(
    "z", [torch.zeros(3, 0), torch.zeros(()), torch.zeros(2, 2, dtype=torch.int32)]
)
def test_what_cannot_be_read(z: Tensor) -> None:
    with pytest.raises(InputError, match="at least one key"):
        row_statistics(z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_squares_and_the_jacobian_bracket(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    z = 3 * torch.randn(20, 33, generator=rng, dtype=torch.float64)
    z = z.masked_fill(torch.rand(20, 33, generator=rng) < 0.3, -torch.inf).to(dtype)
    read = row_statistics(z)
    p = z.double().softmax(-1)
    seen = z.double().masked_fill(z == -torch.inf, 0.0)
    close = {"rtol": 1e-5, "atol": 0.0}
    torch.testing.assert_close(read.score_square.double(), (seen**2).sum(-1), **close)
    torch.testing.assert_close(read.mass_square.double(), (p**2).sum(-1), **close)
    dense = torch.linalg.matrix_norm(
        torch.diag_embed(p) - p[:, :, None] * p[:, None], 2
    )
    upper = read.jacobian_norm.double()
    assert (dense <= upper * (1 + 1e-5)).all() and (
        upper <= 2 * dense * (1 + 1e-5)
    ).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first", [0, 3])
def test_a_causal_limit_reads_as_a_mask_does(dtype: torch.dtype, first: int) -> None:
    rng = torch.Generator().manual_seed(first)
    z = torch.randn(2, 3, 20, 24, generator=rng, dtype=dtype)
    future = torch.ones(20, 24).triu(first + 1).bool()
    masked = row_statistics(z.masked_fill(future, -INF))
    limited = row_statistics(z.masked_fill(future, NAN), causal_from=first)
    for name in RowStatistics.__slots__:
        assert torch.equal(getattr(masked, name), getattr(limited, name)), name
    alone = row_statistics(z[0, 0, 0], causal_from=first)
    assert alone.visible == first + 1 and alone.entropy == limited.entropy[0, 0, 0]


def test_a_causal_limit_holds_for_rows_that_are_searched() -> None:
    """Nearly equal keys under two peaks: no quick step closes these."""
    z = 0.05 * torch.randn(64, 150, generator=torch.Generator().manual_seed(0))
    future = torch.ones(64, 150).triu(40).bool()
    limited = row_statistics(z.masked_fill(future, 9.0), causal_from=39)
    masked = row_statistics(z.masked_fill(future, -INF))
    assert torch.equal(limited.theta_lower, masked.theta_lower)
    assert_reads(limited, reference(z.masked_fill(future, -INF)), atol=2e-6)


def test_large_keys_are_gathered_largest_first() -> None:
    """They are placed in this order: a large key that comes late fits nowhere."""
    p_K = np.array([0.1, 0.3, 0.02, 0.2, 0.3], np.float32)
    room = np.zeros(_KEYS + 8, np.float32)
    count, mass = _gathered(p_K, 5, np.float32(0.05), room)
    expected = np.array([0.3, 0.3, 0.2, 0.1], np.float32)
    assert count == 4 and mass == pytest.approx(0.9)
    assert np.array_equal(room[_KEYS : _KEYS + 4], expected)
