"""The verdicts on separability of Mudarisov et al., recomputed."""

import pytest

from equipoise_lab.claims import mudarisov_separability as claims


def test_dimension_decides_not_eighty_percent() -> None:
    result = claims.eighty_percent()
    found = result.evidence
    assert result.verdict == "refuted"
    assert found["orthonormal, N = 64"] == found["orthonormal, N = 512"] == 1
    assert found["sphere, d = 64, N = 4"] > 0.8 > found["sphere, d = 64, N = 16"]
    assert found["sphere, d = 768, N = 16"] == 1
    assert found["sphere, d = 768, N = 256"] < 0.4
    assert found["sphere, d = 64, N = 256"] < 0.3


def test_identical_tokens_have_perfect_recall() -> None:
    result = claims.collapse_is_rewarded()
    assert result.verdict == "refuted"
    for N in (4, 16, 64):
        assert result.evidence[f"recall, N = {N}"] == 1
        assert result.evidence[f"cosine recall, N = {N}"] == 0
        assert result.evidence[f"random sets, N = {N}"] < 0.1


def test_theorem_2_bounds_the_wrong_side() -> None:
    result = claims.theorem_2()
    found = result.evidence
    assert result.verdict == "corrected"
    assert found["orthonormal, recall"] == 1 > found["orthonormal, bound"]
    assert found["orthonormal, bound"] == pytest.approx(0.9985, abs=1e-4)
    for d, bound in ((8, 0.889), (64, 0.947)):
        recall = found[f"d = {d}, recall"]
        assert found[f"d = {d}, clamped bound"] == pytest.approx(bound, abs=0.005)
        assert recall > found[f"d = {d}, clamped bound"] + 0.05
        assert found[f"d = {d}, ours from below"] <= recall
        assert found[f"d = {d}, ours from above"] >= recall


def test_a_closed_ball_always_holds_an_outsider() -> None:
    result = claims.closed_ball()
    assert result.verdict == "corrected"
    # The part, what stands in its place, four shares and the exact two: exactly.
    assert list(result.evidence.values()) == [0, 1, 1, 0, 1, 1, 0, 1]


def test_better_separation_can_cost_more() -> None:
    result = claims.functional_relevance()
    found = result.evidence
    assert result.verdict == "refuted"
    assert found["recall, apart"] == 1 > 0.5 > found["recall, alike"]
    apart = found["and weights renormalised, apart"]
    assert apart > 10 * found["and weights renormalised, alike"]
    assert found["identities off by, apart"] + found["identities off by, alike"] < 1e-14
