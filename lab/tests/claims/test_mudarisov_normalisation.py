"""The verdicts on what normalisation forbids and on its gradient, recomputed."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.numerics.selection import weight_interval
from equipoise.numerics.selection.concentration import ConcentrationInterval
from equipoise.theory.softmax_norms import SUPREMA
from equipoise_lab.claims import mudarisov_normalisation as claims


def test_the_tight_interval_is_attained_and_the_printed_one_can_pass_one() -> None:
    result = claims.lemma_1()
    found = result.evidence
    assert result.verdict == "holds with a caveat"
    for rho in ("1", "4"):
        for n in (10, 1000):
            attained = found[f"attained, ρ = {rho}, n = {n}"]
            tight = found[f"tight upper, ρ = {rho}, n = {n}"]
            assert attained == pytest.approx(tight, rel=1e-12)
            assert tight < found[f"printed upper, ρ = {rho}, n = {n}"]
    assert found["printed upper, ρ = 4, n = 10"] > 1


def test_weights_need_not_vanish_when_the_range_grows_as_ln_n() -> None:
    result = claims.vanishing_weights()
    found = result.evidence
    assert result.verdict == "holds with a caveat"
    assert found["range fixed at 4, n = 10000"] < 0.006
    for n in claims.LENGTHS:
        assert found[f"range ln(n−1), n = {n}"] == pytest.approx(0.5)
    rising = [found[f"ssmax s = 0.6, gap 2, n = {n}"] for n in claims.LENGTHS]
    falling = [found[f"ssmax s = 0.4, gap 2, n = {n}"] for n in claims.LENGTHS]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert (rising[0], rising[-1]) == pytest.approx((0.638, 0.863), abs=1e-3)
    assert (falling[0], falling[-1]) == pytest.approx((0.412, 0.137), abs=1e-3)


def test_self_adjusted_softmax_has_no_bounded_jacobian() -> None:
    result = claims.self_adjusted_spectrum()
    found = result.evidence
    assert result.verdict == "corrected"
    for c in (1, 10, 100):
        assert found[f"plain, two logits of {c}"] == pytest.approx((1 + c) / 2)
    ratio = found["normalised, span 0.001"] / found["normalised, span 0.01"]
    assert ratio == pytest.approx(10, rel=0.05)
    safe = [v for k, v in found.items() if k.startswith("our safe form")]
    assert max(safe) < 0.5 + 1 + 2**0.5


@pytest.mark.parametrize(
    ("lower", "upper", "attained"),
    [(1, 1, 1), (1, 0.9, 0), (1.1, 1, 0), (1, 9, 0)],
)
def test_only_an_interval_that_rows_attain_is_called_tight(
    monkeypatch: pytest.MonkeyPatch, lower: float, upper: float, attained: int
) -> None:
    def sabotaged(rho: Tensor, visible: Tensor) -> ConcentrationInterval:
        found = weight_interval(rho, visible)
        return ConcentrationInterval(found.lower * lower, found.upper * upper)

    monkeypatch.setattr(claims, "weight_interval", sabotaged)
    found = claims.lemma_1()
    assert found.evidence["the tight ends are attained"] == attained


def test_lemma_1_fails_where_a_weight_leaves_the_printed_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "_alone", lambda rho, n: 2 * math.exp(rho) / n)
    assert claims.lemma_1().verdict == "refuted"


def test_corollary_3_is_off_by_two_and_worse() -> None:
    result = claims.corollary_3()
    assert result.verdict == "corrected"
    found = result.evidence
    for T, norm in ((1.0, 0.5), (0.1, 5.0), (0.01, 50.0)):
        assert found[f"spectral norm at T = {T:g}"] == pytest.approx(norm)
        assert found[f"Frobenius norm at T = {T:g}"] == pytest.approx(norm)
        assert found[f"row length at T = {T:g}"] == pytest.approx(norm / 2**0.5)
        assert found[f"spectral norm at T = {T:g}"] > found[f"claimed at T = {T:g}"]
        assert found[f"largest entry at T = {T:g}"] == pytest.approx(1 / (4 * T))
    assert found["measured change per unit, T = 0.01"] == pytest.approx(49.98, abs=0.01)


def test_lemma_2_holds_with_the_slope_of_the_logarithm() -> None:
    result = claims.lemma_2()
    assert result.verdict == "corrected"
    for name in claims.FAMILIES:
        general = result.evidence[f"largest norm / max|h|, {name}"]
        tie = result.evidence[f"at two equal logits, {name}"]
        assert general <= SUPREMA["spectral"] + 1e-12
        assert tie == pytest.approx(SUPREMA["spectral"])


def test_a_vanishing_minimum_does_no_harm() -> None:
    result = claims.vanishing_minimum()
    assert result.verdict == "refuted"
    assert result.evidence["min F at -100"] < 1e-43
    assert result.evidence["norm at -100"] < 0.5


def test_a_finite_step_is_bounded_by_the_diameter_over_the_step() -> None:
    """Ours: ‖α(l+εv) − α(l)‖/ε ≤ min{1/(2T), √2/ε}, over the grid of their Fig. 4."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 8, generator=rng, dtype=torch.float64)
    v = torch.nn.functional.normalize(
        torch.randn(200, 8, generator=rng, dtype=torch.float64), dim=-1
    )
    for T in (0.001, 0.01, 0.1, 1.0, 100.0):
        for step in (1e-3, 1e-1, 10.0):
            moved = ((logits + step * v) / T).softmax(-1) - (logits / T).softmax(-1)
            change = moved.norm(dim=-1) / step
            assert (change <= min(1 / (2 * T), 2**0.5 / step) * (1 + 1e-9)).all()
