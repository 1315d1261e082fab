"""The verdicts on distances of Mudarisov et al., recomputed."""

import math

import pytest

from equipoise_lab.claims import mudarisov_distance as claims


def test_theorem_1_needs_its_bracket_and_the_largest_weights() -> None:
    result = claims.theorem_1()
    found = result.evidence
    assert result.verdict == "holds with a caveat"
    assert found["violated with the bracket"] == 0
    assert found["violated with a root, of 4000"] > 2000
    assert found["violated by random sets"] > 100
    assert found["the same, sum written out"] == 0
    assert found["d̃ of the lightest of three"] == pytest.approx(0.991, abs=1e-3)
    assert found["its printed bound"] == pytest.approx(0.430, abs=1e-3)
    assert 1 <= found["median bound/true, ours"] < 1.02 < found["median bound/true"]


def test_a_constant_fraction_does_not_bring_the_distance_to_zero() -> None:
    result = claims.vanishing_distance()
    found = result.evidence
    assert result.verdict == "refuted"
    for L in (16, 64, 256, 1024):
        assert found[f"identical tokens, L = {L}"] == pytest.approx(L / 4 - 0.5)
        assert found[f"their bound, L = {L}"] == pytest.approx(L / 4 - 0.5)
        expected = 0.5 * math.sqrt(L / 2)
        assert found[f"on a sphere, L = {L}"] == pytest.approx(expected, rel=0.15)
    peak = found["identical tokens, L = 1024, N = 512"]
    assert found["identical tokens, L = 1024, N = 64"] < peak
    assert found["identical tokens, L = 1024, N = 1023"] < 1 < peak


def test_the_jensen_gap_is_largest_for_flat_weights() -> None:
    result = claims.corollary_2()
    found = result.evidence
    assert result.verdict == "corrected"
    assert found["E[d̃], orthonormal"] == pytest.approx(2.43, abs=0.01)
    assert found["main term, orthonormal"] == pytest.approx(1.01, abs=0.01)
    assert found["E[d̃], identical"] == pytest.approx(3.96, abs=0.01)
    for kind in ("orthonormal", "identical"):
        assert found[f"E[d̃], {kind}"] <= found[f"our upper bound, {kind}"] + 1e-9


def test_the_expectation_is_bounded_in_the_length() -> None:
    result = claims.linear_expectation()
    assert result.verdict == "corrected"
    assert result.evidence["our bound on E[d̃], L = 1024"] < 6
    assert result.evidence["top 5, L = 1024"] == pytest.approx(611, abs=2)


def test_the_critical_size_moves_with_the_number_of_heads() -> None:
    result = claims.critical_fraction()
    found = result.evidence
    assert result.verdict == "refuted"
    assert found["D rejected at 0.01, 144 heads"] == pytest.approx(0.192, abs=0.005)
    assert found["power at a shift of 0.3σ, 144 heads"] == pytest.approx(0.31, abs=0.05)
    few, many = (found[f"critical N with {n} heads"] for n in (36, 576))
    assert many >= 2 * few
    shifts = [found[f"shift seen 4 times in 5, {n} heads"] for n in (36, 144, 576)]
    assert shifts == sorted(shifts, reverse=True)
