"""The verdicts on what normalising forbids, recomputed."""

import pytest

from equipoise.claims import mudarisov_normalisation as claims


def test_the_tight_interval_is_attained_and_the_printed_one_can_pass_one() -> None:
    verdict = claims.lemma_1()
    found = verdict.evidence
    assert verdict.outcome == "corrected"
    for rho in ("1", "4"):
        for n in (10, 1000):
            attained = found[f"attained, ρ = {rho}, n = {n}"]
            tight = found[f"tight upper, ρ = {rho}, n = {n}"]
            assert attained == pytest.approx(tight, rel=1e-12)
            assert tight < found[f"printed upper, ρ = {rho}, n = {n}"]
    assert found["printed upper, ρ = 4, n = 10"] > 1


def test_weights_need_not_vanish_when_the_range_grows_as_ln_n() -> None:
    verdict = claims.vanishing_weights()
    found = verdict.evidence
    assert verdict.outcome == "fails"
    assert found["range fixed at 4, n = 10000"] < 0.006
    for n in claims.LENGTHS:
        assert found[f"range ln(n−1), n = {n}"] == pytest.approx(0.5)
    rising = [found[f"ssmax s = 0.6, gap 2, n = {n}"] for n in claims.LENGTHS]
    falling = [found[f"ssmax s = 0.4, gap 2, n = {n}"] for n in claims.LENGTHS]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert (rising[0], rising[-1]) == pytest.approx((0.638, 0.863), abs=1e-3)
    assert (falling[0], falling[-1]) == pytest.approx((0.412, 0.137), abs=1e-3)


def test_self_adjusted_softmax_has_no_healthy_band() -> None:
    verdict = claims.self_adjusted_spectrum()
    found = verdict.evidence
    assert verdict.outcome == "fails"
    for c in (1, 10, 100):
        assert found[f"plain, two logits of {c}"] == pytest.approx((1 + c) / 2)
    ratio = found["normalised, span 0.001"] / found["normalised, span 0.01"]
    assert ratio == pytest.approx(10, rel=0.05)
    safe = [v for k, v in found.items() if k.startswith("our safe form")]
    assert max(safe) < 0.5 + 1 + 2**0.5
