"""Printed formulas and depth arguments: what a check must find, and on what."""

import pytest

from equipoise_lab.claims import (
    baek_estimators,
    baek_networks,
    emadi_depth,
    measured_results,
    mudarisov_distance,
    mudarisov_normalisation,
    petrov_formulas,
)
from equipoise_lab.claims.result import Check


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (petrov_formulas.layer_norm_jacobian, "holds"),
        (petrov_formulas.layer_norm_hessian, "holds"),
        (petrov_formulas.block_chain_rule, "holds"),
        (petrov_formulas.relu_is_flat, "holds"),
        (petrov_formulas.model_sizes, "holds"),
        (petrov_formulas.mixed_blocks_are_exchanged, "corrected"),
        (petrov_formulas.constants_disagree, "refuted"),
        (mudarisov_normalisation.swapped_leaders, "holds"),
        (mudarisov_normalisation.low_temperature, "corrected"),
        (mudarisov_normalisation.independent_heads, "holds with a caveat"),
        (baek_estimators.two_roundoffs, "corrected"),
        (baek_estimators.score_ratio_is_at_least_one, "holds"),
        (baek_estimators.score_term_is_a_product, "corrected"),
        (baek_estimators.norm_coefficient_is_loose, "holds with a caveat"),
        (baek_networks.gain_is_not_small, "refuted"),
        (baek_networks.zeros_hide_failures, "refuted"),
    ],
)
def test_verdicts_that_follow_from_algebra(check: Check, verdict: str) -> None:
    assert check().verdict == verdict


def test_four_published_attention_blocks_are_right_and_two_are_missing() -> None:
    result = petrov_formulas.attention_blocks()
    assert result.verdict == "holds with a caveat"
    errors = {name for name in result.evidence if name.endswith("relative error")}
    assert {name.split(":")[0] for name in errors} == {"VV", "QQ", "VQ", "QK"}
    assert result.evidence["blocks that are not given"] == 2


def test_the_value_path_grows_as_one_plus_beta_squared() -> None:
    """(1 + β²)^N is known: (1 + ¼)^16 at β = 16^(−¼)."""
    e = emadi_depth.value_path_has_two_maps().evidence
    assert e["‖∂X_N/∂X_0‖ at N = 16, β = N^(−1/4)"] == pytest.approx(1.25**16)
    assert e["‖∂X_N/∂X_0‖ at N = 16, β = N^(−1/2)"] == pytest.approx((1 + 1 / 16) ** 16)


def test_gains_on_queries_and_keys_do_not_slow_the_value_path() -> None:
    e = emadi_depth.asymmetric_gains().evidence
    assert e["‖∂X_N/∂X_0‖ with 1/N on W_Q and W_K"] == pytest.approx(2.0**32)


def test_deepnorm_keeps_the_update_constant_not_the_product() -> None:
    result = emadi_depth.deepnorm_is_not_the_quartic_path()
    assert result.verdict == "corrected"
    assert result.evidence["exponent over N of N·product"] == pytest.approx(0.25)


def test_random_sets_are_between_the_main_term_and_our_bound() -> None:
    result = mudarisov_distance.random_sets()
    assert result.verdict == "corrected"
    assert result.evidence["rows outside our bounds"] == 0


def test_one_token_short_of_all_the_distance_is_not_small() -> None:
    result = mudarisov_distance.all_tokens_chosen()
    assert result.verdict == "holds with a caveat"


def test_our_predictor_is_near_where_the_published_one_is_not() -> None:
    result = baek_networks.prediction_is_vacuous()
    assert result.verdict == "corrected"
    assert result.evidence["predicted ÷ measured, published"] > 1e4


def test_published_predictors_do_not_track_within_a_format() -> None:
    for check in (
        measured_results.v1_tracks_the_error,
        measured_results.v2_tracks_the_error,
    ):
        result = check()
        assert result.verdict == "pattern not reproduced"
        assert result.evidence["ours"] > 0.9 > 0 > result.evidence["log correlation"]
