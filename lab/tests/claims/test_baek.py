"""The verdicts on Baek's indicators, statistics and interventions, recomputed."""

from functools import partial

import pytest

from equipoise.remedies.epsilon import Bgss, Budget
from equipoise_lab.claims import baek_estimators, baek_heads, baek_networks


def test_rescaled_copies_get_different_v1_terms() -> None:
    result = baek_heads.not_unitless()
    assert result.verdict == "corrected"
    e = result.evidence
    assert e["measured error, c = 1"] == e["measured error, c = 8"]
    ratio = e["v1 κ(V)‖W_O‖₂, c = 1"] / e["v1 κ(V)‖W_O‖₂, c = 8"]
    assert ratio == pytest.approx(8, rel=1e-3)
    assert e["ours, c = 8"] == pytest.approx(e["ours, c = 1"], rel=1e-6)


def test_row_maximum_is_no_bound() -> None:
    result = baek_heads.row_maximum_is_no_bound()
    assert result.verdict == "corrected"
    e = result.evidence
    measured = e["measured ‖ΔP‖/(u‖P‖)"]
    assert e["row maximum × (1 + κ_score)"] < 1e-9 < measured < e["matrix form"]


def test_value_condition_misleads_both_ways() -> None:
    result = baek_heads.value_condition_misleads()
    assert result.verdict == "refuted"
    assert result.evidence["κ_val, centred"] > 1e12
    assert result.evidence["κ_val, thin column"] < 3


def test_epsilon_moves_the_constant_not_the_error() -> None:
    result = baek_heads.epsilon_does_not_set_the_error()
    assert result.verdict == "refuted"
    e = result.evidence
    assert e["C_LN, ε = 1e-06"] > 5000 * e["C_LN, ε = 0.01"]
    assert e["ρ_LN in fp32, σ² = 0.6 (claimed ε-dominated below 1)"] < 1


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (baek_heads.token_mean_variance_hides_small_tokens, "refuted"),
        (baek_heads.norm_ratio_is_no_transport, "refuted"),
        (baek_heads.residual_does_not_relax, "corrected"),
    ],
)
def test_other_counterexamples_stand(check, verdict) -> None:  # type: ignore[no-untyped-def]
    assert check().verdict == verdict


def test_tf32_reference_hides_two_fifths() -> None:
    e = baek_heads.tf32_reference_understates().evidence
    assert e["fp16 against TF32"] == pytest.approx(2.08e-4, rel=0.02)
    assert e["fp16 against float64"] == pytest.approx(3.59e-4, rel=0.02)


def test_independent_growth_passes_the_published_test() -> None:
    result = baek_networks.independent_curves_pass()
    assert result.verdict == "corrected"
    e = result.evidence
    assert e["independent pairs with p ≤ 0.002"] == 1.0
    assert e["their mean r"] > 0.6
    # 12 pairs at a true 5 %: more than 4 has probability 1e-4.
    assert e["share with p ≤ 0.05 in our test"] <= 4 / 12


def test_a_constant_collapses_too() -> None:
    e = baek_networks.collapse_is_the_format().evidence
    assert e["constant × ε_mach"] > 0.99
    assert e["random predictor × ε_mach"] > 0.95
    assert abs(e["random predictor within bf16"]) < 0.7


def test_the_released_intervention_cannot_fire() -> None:
    result = baek_estimators.intervention_never_fires()
    assert result.verdict == "refuted"
    e = result.evidence
    assert e["largest σ² at which it can fire"] == pytest.approx(8e-5)
    assert e["largest change of ε for any σ²"] <= 1 / 0.6 + 1e-9


def test_six_actions_move_a_norm_by_less_than_a_thousandth() -> None:
    result = baek_estimators.bgss_moves_little()
    assert result.verdict == "undecided"
    e = result.evidence
    assert e["final ε"] == pytest.approx(1.73e-3, rel=2e-3)
    assert e["relative change of the norm's output at σ² = 1"] < 1e-3
    assert e["largest σ² at which ε alone cuts an error by 63 %"] < 3e-4


def test_a_budget_that_could_cut_the_error_would_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generous = partial(Bgss, budget=Budget(ceiling=10.0, growth=100.0))
    monkeypatch.setattr(baek_estimators, "Bgss", generous)
    assert baek_estimators.bgss_moves_little().verdict == "holds"


def test_bit_identical_copies_get_other_v2_risks() -> None:
    result = baek_networks.risk_is_not_unitless()
    assert result.verdict == "corrected"
    e = result.evidence
    for c in (2, 16, 256):
        assert e[f"measured error, c = {c}"] == e["measured error, c = 1"]
        assert e[f"ours, c = {c}"] == pytest.approx(e["ours, c = 1"], rel=1e-6)
    assert e["v2 risk, c = 256"] > 28 * e["v2 risk, c = 1"]


def test_bgss_ranks_against_the_effect() -> None:
    result = baek_networks.ranking_prefers_where_epsilon_acts_least()
    assert result.verdict == "refuted"
    e = result.evidence
    assert e["what six actions change, σ² = 1"] == pytest.approx(8.6e-4, rel=0.01)


def test_twelve_layers_by_chance() -> None:
    result = baek_networks.layer_ranks_need_a_null()
    assert result.verdict == "undecided"
    e = result.evidence
    assert e["standard deviation by chance, one window"] == pytest.approx(
        0.30, abs=0.02
    )
    assert e["layer index alone, errors that drift with depth"] > 0.362


@pytest.mark.parametrize(
    ("layers", "drift", "outcome"),
    [
        (100, 1e4, "holds"),
        (100, 6.0, "undecided"),
        (12, 1e4, "undecided"),
    ],
)
def test_a_rank_beyond_both_nulls_would_hold(
    monkeypatch: pytest.MonkeyPatch, layers: int, drift: float, outcome: str
) -> None:
    monkeypatch.setattr(baek_networks, "LAYERS", layers)
    monkeypatch.setattr(baek_networks, "DRIFT", drift)
    assert baek_networks.layer_ranks_need_a_null().verdict == outcome


def test_released_estimators_read_low() -> None:
    result = baek_estimators.power_iterations_read_low()
    assert result.verdict == "refuted"
    e = result.evidence
    assert e["v2, least estimate ÷ exact"] < 0.5
    assert e["v2, 5th percentile"] < e["v1, 5th percentile"] < 1


def test_an_offset_changes_kappa_and_nothing_else() -> None:
    e = baek_estimators.kappa_softmax_sees_a_common_offset().evidence
    assert e["κ, offset 0"] == pytest.approx(0.505, abs=5e-3)
    assert e["κ, offset 100"] == pytest.approx(71, rel=0.02)
    assert e["κ, offset 1000"] == pytest.approx(714, rel=0.02)


def test_the_analytic_checks_hold_and_why() -> None:
    result = baek_estimators.analytic_checks()
    assert result.verdict == "holds"
    assert result.evidence["residual: bound respected"] == 1.0
    assert result.evidence["LayerNorm: Pearson"] == pytest.approx(0.938, abs=0.03)
