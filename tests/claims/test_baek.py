"""The verdicts on Baek's indicators, statistics and interventions, recomputed."""

import pytest

from equipoise.claims import baek_epsilon, baek_heads, baek_statistics


def test_rescaled_twins_get_different_v1_terms() -> None:
    verdict = baek_heads.not_unitless()
    assert verdict.outcome == "fails"
    e = verdict.evidence
    assert e["measured error, c = 1"] == e["measured error, c = 8"]
    ratio = e["v1 κ(V)‖W_O‖₂, c = 1"] / e["v1 κ(V)‖W_O‖₂, c = 8"]
    assert ratio == pytest.approx(8, rel=1e-3)
    assert e["ours, c = 8"] == pytest.approx(e["ours, c = 1"], rel=1e-6)


def test_row_maximum_is_no_bound() -> None:
    verdict = baek_heads.row_maximum_is_no_bound()
    assert verdict.outcome == "fails"
    e = verdict.evidence
    measured = e["measured ‖ΔP‖/(u‖P‖)"]
    assert e["row maximum × (1 + κ_score)"] < 1e-9 < measured < e["matrix form"]


def test_value_condition_misleads_both_ways() -> None:
    verdict = baek_heads.value_condition_misleads()
    assert verdict.outcome == "fails"
    assert verdict.evidence["κ_val, centred"] > 1e12
    assert verdict.evidence["κ_val, thin column"] < 3


def test_epsilon_moves_the_constant_not_the_error() -> None:
    verdict = baek_heads.epsilon_does_not_set_the_error()
    assert verdict.outcome == "fails"
    e = verdict.evidence
    assert e["C_LN, ε = 1e-06"] > 5000 * e["C_LN, ε = 0.01"]
    assert e["ρ_LN in fp32, σ² = 0.6 (claimed ε-dominated below 1)"] < 1


@pytest.mark.parametrize(
    "check",
    [
        baek_heads.token_mean_variance_hides_small_tokens,
        baek_heads.norm_ratio_is_no_transport,
        baek_heads.residual_does_not_relax,
    ],
)
def test_other_counterexamples_stand(check) -> None:  # type: ignore[no-untyped-def]
    assert check().outcome == "fails"


def test_tf32_reference_hides_two_fifths() -> None:
    e = baek_heads.tf32_reference_understates().evidence
    assert e["fp16 against TF32"] == pytest.approx(2.08e-4, rel=0.02)
    assert e["fp16 against float64"] == pytest.approx(3.59e-4, rel=0.02)


def test_independent_growth_passes_the_published_test() -> None:
    verdict = baek_statistics.independent_curves_pass()
    assert verdict.outcome == "fails"
    e = verdict.evidence
    assert e["independent pairs with p ≤ 0.002"] == 1.0
    assert e["their mean r"] > 0.6
    # 12 pairs at a true 5 %: more than 4 has probability 1e-4.
    assert e["share with p ≤ 0.05 in our test"] <= 4 / 12


def test_a_constant_collapses_too() -> None:
    e = baek_statistics.collapse_is_the_format().evidence
    assert e["constant × ε_mach"] > 0.99
    assert e["random predictor × ε_mach"] > 0.95
    assert abs(e["random predictor within bf16"]) < 0.7


def test_the_released_intervention_cannot_fire() -> None:
    verdict = baek_epsilon.intervention_never_fires()
    assert verdict.outcome == "fails"
    e = verdict.evidence
    assert e["largest σ² at which it can fire"] == pytest.approx(8e-5)
    assert e["largest change of ε for any σ²"] <= 1 / 0.6 + 1e-9


def test_six_actions_move_a_norm_by_less_than_a_thousandth() -> None:
    e = baek_epsilon.bgss_moves_little().evidence
    assert e["final ε"] == pytest.approx(1.73e-3, rel=2e-3)
    assert e["relative change of the norm's output at σ² = 1"] < 1e-3
