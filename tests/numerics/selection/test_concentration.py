"""What the range of logits allows, the laws of capacity, and the finite step."""

import math

import pytest
import torch
from scipy import stats

from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS
from equipoise.numerics.selection import (
    capacity,
    capacity_at,
    concentration,
    entropy_floor,
    logit_range,
    published_sphere_recall,
    range_needed,
    separability,
    sphere_recall,
    step_bound,
    step_sensitivity,
    weight_interval,
    weighted_tokens,
)
from tests.conftest import FLOATS, error_budget
from tests.numerics.selection.specimens import normal

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 8.0])
def test_concentration_reads_what_scipy_reads(
    dtype: torch.dtype, temperature: float, rng: torch.Generator
) -> None:
    """Entropy of 20 keys: some tens of operations in float32 at the least."""
    scores = normal(30, 20, rng=rng).to(dtype)
    found = concentration(scores, temperature=temperature)
    p = (scores.double() / temperature).softmax(-1)
    tolerance = error_budget(torch.float32, ops=100) / temperature
    expected = torch.tensor(stats.entropy(p.numpy(), axis=-1))
    torch.testing.assert_close(found.entropy.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        found.evenness.double(), expected.exp() / 20, rtol=0, atol=tolerance
    )
    z = scores.double() / temperature
    spread = z.amax(-1) - z.amin(-1)
    torch.testing.assert_close(found.rho.double(), spread, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.p_max.double(), p.amax(-1), rtol=0, atol=tolerance)
    assert (found.weight.upper >= found.p_max * (1 - 1e-5)).all()


def test_both_ends_of_lemma_1_are_attained() -> None:
    """One logit at one end, all others at the other."""
    for n, rho in ((2, 0.5), (10, 3.0), (1000, 7.0)):
        z = torch.zeros(2, n, dtype=torch.float64)
        z[0, 0], z[1, 0] = rho, -rho
        p = z.softmax(-1)[:, 0]
        ends = weight_interval(torch.tensor(rho).double(), torch.tensor(float(n)))
        torch.testing.assert_close(torch.stack([ends.upper, ends.lower]), p)


def test_range_needed_is_the_inverse_of_lemma_1() -> None:
    """The table of the theory: L = 1024 and 32768, half and nine tenths."""
    for n, c, rho in ((1024, 0.5, 6.93), (1024, 0.9, 9.13), (32768, 0.5, 10.4)):
        assert range_needed(n, c) == pytest.approx(rho, abs=0.01)
        attained = weight_interval(
            torch.tensor(range_needed(n, c)).double(), torch.tensor(n)
        )
        assert attained.upper.item() == pytest.approx(c)
    assert range_needed(1, 0.9) == 0.0


def test_the_entropy_floor_holds_where_rows_are_long_enough_to_reach_for_it() -> None:
    """1 % of 10⁵ keys at ρ = 8: H is below ln n − ρ/2, so no smaller slope would do."""
    z = torch.zeros(10**5, dtype=torch.float64)
    z[:1000] = 8.0
    floor = entropy_floor(logit_range(z), torch.tensor(1e5).double())
    entropy = stats.entropy(z.softmax(-1).numpy())
    assert floor.item() == pytest.approx(math.log(1e5) - 8)
    assert floor.item() <= entropy < math.log(1e5) - 4
    flat = entropy_floor(torch.tensor(0.0), torch.tensor(7.0))
    assert flat.item() == pytest.approx(math.log(7))


def test_hidden_keys_odd_rows_and_nan() -> None:
    z = torch.full((5, 4), -INF)
    z[1, 2] = 3.0
    z[2, :2] = torch.tensor([1.0, 4.0])
    z[3, :2] = torch.tensor([NAN, 0.0])
    z[4] = torch.tensor([0.0, 9.0, 1.0, 2.0])
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[4, 1] = False
    found = concentration(z, mask=mask)
    assert found.visible.tolist() == [0, 1, 2, 2, 3]
    torch.testing.assert_close(
        found.rho, torch.tensor([0, 0, 3.0, NAN, 2.0]), equal_nan=True
    )
    assert found.entropy.isnan().tolist() == [False, False, False, True, False]
    assert found.entropy[:2].tolist() == [0, 0] and found.p_max[:2].tolist() == [0, 1]


def test_a_rival_is_measured_by_its_own_weights(rng: torch.Generator) -> None:
    z = 3 * normal(20, 16, rng=rng)
    sparse = concentration(z, normaliser=NORMALISERS["sparsemax"]())
    plain = concentration(z)
    assert (sparse.entropy < plain.entropy).all()
    torch.testing.assert_close(sparse.rho, plain.rho)


def flat_recall(width: int, L: int, N: int, ratio: float) -> float:
    """Return N_s/N of tokens uniform on a sphere, chosen ones weighing ``ratio``."""
    rng, rows = torch.Generator().manual_seed(width + N), 2048 // width
    x = torch.nn.functional.normalize(normal(rows, L, width, rng=rng), dim=-1)
    w = torch.ones(rows, 1, L, dtype=torch.float64)
    w[..., :N] *= ratio
    return separability(weighted_tokens(w, x), N).recall.mean().item()


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("width", [64, 256])
def test_separability_breaks_near_the_capacity(width: int, ratio: float) -> None:
    """Laws, not bounds: at N* recall is between a third and nine tenths, and at N_q
    within 0.15 of q."""
    L = 1024
    at = flat_recall(width, L, round(capacity(width, L, ratio=ratio)), ratio)
    assert 0.33 < at < 0.93
    for q in (0.8, 0.5):
        N = capacity_at(width, L, q, ratio=ratio)
        assert flat_recall(width, L, max(2, round(N)), ratio) == pytest.approx(
            q, abs=0.17
        )
    many = round(8 * capacity(width, L, ratio=ratio))
    assert flat_recall(width, L, many, ratio) < 0.45


def test_capacity_of_wide_tokens() -> None:
    assert [round(capacity(d, 1024), 1) for d in (64, 256, 768)] == [4.6, 18.5, 55.4]
    assert capacity(64, 1024, ratio=2.0) == pytest.approx(7.2, abs=0.05)
    assert capacity_at(64, 1024, 1e-9) == math.inf


def test_sphere_bounds_hold_the_simulated_recall(rng: torch.Generator) -> None:
    for width, r in ((8, 0.35), (64, 0.30), (64, 0.12)):
        w = torch.full((16,), 0.9 / 16, dtype=torch.float64)
        x = torch.nn.functional.normalize(normal(500, 16, width, rng=rng), dim=-1)
        y = w[:, None] * x
        inside = (y.sum(1, keepdim=True) - y).norm(dim=-1) <= r
        seen = inside.double().mean().item()
        found = sphere_recall(w, r, width=width)
        assert found.lower - 0.02 <= seen <= found.upper + 0.02


def test_the_variance_on_a_sphere_is_in_closed_form(rng: torch.Generator) -> None:
    """Var X² = (2/d)(σ⁴ − Σα⁴) for five unequal weights: 20000 draws, 5 %."""
    w = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.05], dtype=torch.float64)
    x = torch.nn.functional.normalize(normal(20000, 5, 16, rng=rng), dim=-1)
    square = (w[:, None] * x).sum(1).square().sum(-1)
    sigma2 = w.square().sum()
    exact = 2 / 16 * (sigma2**2 - (w**4).sum())
    assert square.mean().item() == pytest.approx(sigma2.item(), rel=0.01)
    assert square.var().item() == pytest.approx(exact.item(), rel=0.05)
    assert exact < 2 / 16 * sigma2**2


def test_a_token_alone_is_always_found() -> None:
    found = sphere_recall(torch.tensor([0.7]), 0.1, width=3)
    assert (found.lower, found.upper) == (1, 1)
    theirs = published_sphere_recall(torch.tensor([0.2, 0.2]), 0.1, gap=1.0)
    assert theirs.lower == pytest.approx(-1.0)
    assert theirs.upper == pytest.approx(math.exp(-0.005))


@pytest.mark.parametrize(
    "name", sorted(set(NORMALISERS) - {"self-adjusted", "softpick"})
)
def test_a_finite_step_stays_below_its_bound(name: str, rng: torch.Generator) -> None:
    scores = 3 * normal(200, 6, rng=rng)
    scores[:, 4:] = scores[:, 4:].masked_fill(scores[:, 4:] > 0, -INF)
    for temperature in (0.05, 1.0):
        for step in (1e-3, 0.1, 10.0):
            found = step_sensitivity(
                scores,
                step=step,
                temperature=temperature,
                generator=rng,
                normaliser=NORMALISERS[name](),
            )
            if name != "adaptive-temperature":  # its constant holds β fixed
                assert (found.value <= found.bound * (1 + 1e-6)).all()
            assert found.value.isfinite().all()


def test_the_random_direction_finds_the_frobenius_norm(rng: torch.Generator) -> None:
    """E g² = ‖J‖_F²/n for a small step, over rows of one p: 20000 draws, 3 %."""
    z = normal(1, 12, rng=rng).expand(20000, 12)
    g = step_sensitivity(z, step=1e-4, generator=rng).value
    p = z[0].softmax(-1)
    J = torch.diag(p) - torch.outer(p, p)
    expected = (J.norm() / 12**0.5).item()
    assert g.square().mean().sqrt().item() == pytest.approx(expected, rel=0.03)


def test_broken_inputs(rng: torch.Generator) -> None:
    with pytest.raises(InputError, match="0 < share < 1"):
        range_needed(10, 1.0)
    with pytest.raises(InputError, match="two keys left"):
        capacity(64, 3, chosen=2)
    with pytest.raises(InputError, match="between 0 and 1"):
        capacity_at(64, 1024, 1.0)
    with pytest.raises(InputError, match="dimension"):
        sphere_recall(torch.ones(2), 1.0, width=0)
    with pytest.raises(InputError, match="positive"):
        step_bound(0.0, 1.0)
    with pytest.raises(InputError, match="positive"):
        step_sensitivity(torch.ones(3), step=-1.0, generator=rng)
