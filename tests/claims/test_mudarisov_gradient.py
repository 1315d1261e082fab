"""The verdicts on the gradient bounds of Mudarisov et al., recomputed."""

import pytest
import torch

from equipoise.claims import mudarisov_normalisation as mudarisov_gradient
from equipoise.theory.softmax_norms import SUPREMA


def test_corollary_3_is_off_by_two_and_worse() -> None:
    verdict = mudarisov_gradient.corollary_3()
    assert verdict.outcome == "fails"
    found = verdict.evidence
    for T, norm in ((1.0, 0.5), (0.1, 5.0), (0.01, 50.0)):
        assert found[f"spectral norm at T = {T:g}"] == pytest.approx(norm)
        assert found[f"Frobenius norm at T = {T:g}"] == pytest.approx(norm)
        assert found[f"row length at T = {T:g}"] == pytest.approx(norm / 2**0.5)
        assert found[f"spectral norm at T = {T:g}"] > found[f"claimed at T = {T:g}"]
        assert found[f"largest entry at T = {T:g}"] == pytest.approx(1 / (4 * T))
    assert found["measured change per unit, T = 0.01"] == pytest.approx(49.98, abs=0.01)


def test_lemma_2_holds_with_the_slope_of_the_logarithm() -> None:
    verdict = mudarisov_gradient.lemma_2()
    assert verdict.outcome == "corrected"
    for name in mudarisov_gradient.FAMILIES:
        general = verdict.evidence[f"largest norm / max|h|, {name}"]
        tie = verdict.evidence[f"at two equal logits, {name}"]
        assert general <= SUPREMA["spectral"] + 1e-12
        assert tie == pytest.approx(SUPREMA["spectral"])


def test_a_vanishing_minimum_harms_nobody() -> None:
    verdict = mudarisov_gradient.vanishing_minimum()
    assert verdict.outcome == "fails"
    assert verdict.evidence["min F at -100"] < 1e-43
    assert verdict.evidence["norm at -100"] < 0.5


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
