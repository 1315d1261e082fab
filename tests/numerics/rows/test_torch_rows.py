"""The torch path of a device: certified, without a sort, and never waiting for it."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.numerics.rows import torch_rows
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.statistics import row_columns
from tests.oracles import balance as oracle

INF = math.inf
FORBIDDEN = ("nonzero", "_local_scalar_dense", "masked_select", "sort.", "index.")


class Watched(TorchDispatchMode):
    """Refuses whatever waits for a device, and counts visits to all scores."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries, self.visits = entries, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(function).removeprefix("aten.")
        assert not name.startswith(FORBIDDEN), name
        given = [x for x in args if isinstance(x, Tensor)]
        views = ("view", "slice", "select", "detach", "alias", "_unsafe_view")
        few = ("gather", "searchsorted")  # look at a few entries of each row
        if not name.startswith((*views, *few)):
            self.visits += any(x.numel() >= self.entries for x in given)
        return function(*args, **(kwargs or {}))


def drawn(family: str, rows: int, K: int) -> Tensor:
    """Return scores whose rows are of one family of the oracle."""
    rng = np.random.default_rng(K)
    p = oracle.rows(family, rng, (rows, K))
    return torch.from_numpy(np.log(np.maximum(p, 1e-300))).float()


@pytest.mark.parametrize("K", [1, 2, 3, 9, 10, 11, 15, 40, 300, 600])
def test_intervals_hold_the_truth(K: int, device: torch.device) -> None:
    """The truth is that of the same float32 scores, from float64 exponentials.

    No row may be missed: the rounding of exponentials is part of the interval.
    """
    z = torch.cat([drawn(family, 12, K) for family in sorted(oracle.FAMILIES)])
    read = torch_rows.columns(z.to(device)).cpu().double()
    truth = balance(z.double().softmax(-1))
    # The reference itself is one of float64: a few units of its last place.
    assert (read[0] <= truth.upper + 1e-14).all()
    assert (read[1] >= truth.lower - 1e-14).all()
    assert (read[0] <= read[1]).all()
    if K <= 15:  # every subset is tried
        assert (read[1] - read[0] <= 2e-6).all()
        assert (read[1] - truth.upper).abs().max() <= 2e-6


@pytest.mark.parametrize(("scale", "K"), [(1.0, 200), (2.0, 1024), (4.0, 700)])
def test_lower_is_that_of_the_compiled_kernel(scale: float, K: int) -> None:
    z = scale * torch.randn(1000, K, generator=torch.Generator().manual_seed(K))
    read, other = torch_rows.columns(z), row_columns(z, sort_open=True)
    assert ((read[0] - other[0]).abs() <= 1e-6).double().mean() >= 0.99
    assert (read[1] - read[0] <= 1e-4).double().mean() >= 0.99


def test_the_other_columns(device: torch.device) -> None:
    z = 3 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    z = z.masked_fill(torch.rand(50, 300) < 0.4, -INF)
    read = torch_rows.columns(z.to(device)).cpu().double()
    p = z.double().softmax(-1)
    seen = z.double().masked_fill(z == -INF, 0.0)
    expected = [
        z.amax(-1).double(),
        -torch.special.xlogy(p, p).sum(-1),
        p[:, 0],
        p.amax(-1),
        seen.square().sum(-1),
        p.square().sum(-1),
        (z > -INF).sum(-1).double(),
    ]
    for got, value in zip(read[2:], expected, strict=True):
        torch.testing.assert_close(got, value, rtol=2e-6, atol=2e-7)


def test_an_odd_number_of_equal_keys_is_proven() -> None:
    read = torch_rows.columns(torch.zeros(1, 301))
    assert read[0] == pytest.approx(1 - 301.0**-2, abs=1e-7)
    assert read[1] - read[0] <= 4e-7


@pytest.mark.parametrize("K", [64, 1024])
def test_it_never_waits_nor_sorts(K: int) -> None:
    """On ``meta`` any read of data raises.

    Three passes, each of which needs a result of the one before, are 18 operators that
    visit all scores: more would be a pass that nothing asked for.
    """
    torch_rows.columns(torch.empty(8, K, device="meta"))
    with Watched(8 * K) as watched:
        torch_rows.columns(torch.randn(8, K))
    assert K == 64 or watched.visits <= 18


@pytest.mark.parametrize("K", [5, 11, 16, 20])
def test_the_mass_is_that_of_a_subset(K: int) -> None:
    """Also where the next keys or a run complete a deal: every subset is summed."""
    for family in sorted(oracle.FAMILIES):
        p = oracle.rows(family, np.random.default_rng(K), (4, K))
        rows = torch.from_numpy(p)
        found = torch_rows.split(rows.clone(), *torch_rows.largest(rows))
        for row, inside, outside in zip(
            p, found.inside_N, found.outside_N, strict=True
        ):
            sums = np.zeros(1)
            for x in row:
                sums = np.concatenate((sums, sums + x))
            # Sums of up to 20 float64 numbers in another order.
            close = np.abs(sums - float(inside)).min()
            assert close <= 1e-15 and abs(float(inside + outside) - 1) <= 1e-14


@pytest.mark.parametrize("seen", [12, 16, 40, 100])
def test_few_visible_keys_of_a_long_row(seen: int) -> None:
    """As in a pack of documents: what counts is the keys that a row sees."""
    rng = torch.Generator().manual_seed(seen)
    z = torch.full((400, 900), -INF)
    for i, begin in enumerate(torch.randint(900 - seen, (400,), generator=rng)):
        z[i, begin : begin + seen] = torch.randn(seen, generator=rng)
    read, other = torch_rows.columns(z), row_columns(z, sort_open=True)
    assert ((read[0] - other[0]).abs() <= 1e-6).double().mean() >= 0.99
    assert seen > 16 or (read[1] - read[0] <= 2e-6).all()


def test_a_deal_that_others_could_complete_is_not_proven() -> None:
    """Few deals are within reach of the small keys, and the best found is not it."""
    generator = torch.Generator().manual_seed(0)
    spread = 1 + 0.2 * torch.rand(512, 9, generator=generator, dtype=torch.float64)
    large = (spread * 0.5 ** torch.arange(9)).clamp(min=0.02)
    small = 0.005 + 0.01 * torch.rand(512, 9, generator=generator, dtype=torch.float64)
    z = torch.cat((large, small), 1).log()
    upper, truth = torch_rows.columns(z)[1], balance(z.softmax(-1))
    assert bool(truth.exact.all())
    # Both are float64: a proof where there is none is off by 1e-7 and more.
    assert float((truth.lower - upper).max()) <= 1e-12
