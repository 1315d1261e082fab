"""Every statement that the four papers make has a check, one by one."""

import json
from pathlib import Path

import pytest

from equipoise_lab.claims import catalogue
from equipoise_lab.claims.exact import (
    BY_HAND,
    COUNTEREXAMPLES,
    NOT_ALGEBRAIC,
    confirmation,
)
from equipoise_lab.claims.result import WRONG

CLAIMS = [claim.id for claim in catalogue.select()]
VERDICTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/claims_sabotage.json").read_text()
)["rows"]


def _named(prefix: str, numbers: range, *claims: str) -> dict[str, tuple[str, ...]]:
    """Return a line for every number: the claims that cover it, words by a space."""
    lines = (tuple(line.split()) for line in claims)
    return {f"{prefix}{n}": line for n, line in zip(numbers, lines, strict=True)}


COVERED: dict[str, dict[str, tuple[str, ...]]] = {
    "emadi2026": {
        "Thm 4.2": ("balanced_mass",),
        **_named(
            "Cor. 4.3 ", range(1, 5), "regimes", "regimes", "peaked_bound", "regimes"
        ),
        "greedy heuristic": ("greedy_prefix", "example_row"),
        "Lemma 3.2": ("mixing_does_not_expand",),
        "Lemma 3.3": ("norm_resets_magnitude",),
        "Lemma A.1": ("norm_constant_is_true_and_empty",),
        "Thm 5.1": (
            "attention_bound_is_loose",
            "measured_theta_is_local",
            "biases_are_not_in_the_magnitude",
        ),
        **_named(
            "Thm 5.",
            range(2, 6),
            "residual_forms",
            "residual_forms",
            "residual_forms product_of_layer_bounds",
            "residual_forms",
        ),
        "GELU constant": ("activation_constant",),
        "Thm 6.1": ("path_exponent", "value_path_has_two_maps"),
        "Thm 6.1 and DeepNorm": ("deepnorm_is_not_the_quartic_path",),
        "Thm 6.2, tightness, asymmetric scaling": ("asymmetric_gains",),
        "DeepNorm's two forms": ("deepnorm_forms_agree",),
        "θ ≈ 1 persists": ("theta_persists", "one_throughout"),
        "warm-up and G": ("projection_gain_grows",),
        "temperature warm-up": ("temperature_throttles_gradients_only",),
        "exponents m = 3, 2": ("exponents_of_training",),
        "Table 1": ("pre_norm_ends_lower",),
        **_named(
            "Fig. ",
            range(1, 7),
            "post_norm_gradients_vanish",
            "projection_gain_grows",
            "brute_force_agrees",
            "theta_stays_one",
            "sensitivity_is_larger_in_pre_norm sensitivity_spreads_more_in_pre_norm",
            "sensitivity_grows_with_depth",
        ),
        "App. E.6": ("growth_is_of_magnitude",),
        "51.45": ("losses_are_sums",),
        "60.6 against 61.15": ("two_losses_of_post_norm",),
        "length-independence": ("length_does_not_enter",),
        "Remarks B.1, B.2": ("remarks_of_the_appendix",),
        "θ is not entropy": ("theta_is_not_entropy",),
        "measured end to end": ("product_of_layer_bounds",),
        "projection-like, at init and after": ("post_norm_decay_comes_with_collapse",),
    },
    "mudarisov2025": {
        "Lemma 1": ("lemma_1", "vanishing_weights"),
        "Lemma 2": ("lemma_2", "swapped_leaders"),
        **_named(
            "Cor. ",
            range(1, 4),
            "lemma_1",
            "corollary_2 all_tokens_chosen",
            "corollary_3",
        ),
        **_named("Thm ", range(1, 3), "theorem_1 random_sets", "theorem_2"),
        **_named(
            "Algorithm ",
            range(1, 6),
            "distance_grows_linearly",
            "few_tokens_are_enough",
            "critical_fraction",
            "separability_settles",
            "sensitivity_over_temperature random_directions_understate",
        ),
        "0.06·L": ("critical_fraction",),
        "70–85 %": ("eighty_percent", "separability_settles"),
        "guidelines": ("low_temperature", "independent_heads"),
        **_named(
            "E-",
            range(14),
            "theorem_1",
            "corollary_3",
            "vanishing_distance",
            "corollary_2",
            "linear_expectation",
            "critical_fraction",
            "eighty_percent",
            "collapse_is_rewarded",
            "theorem_2",
            "closed_ball",
            "vanishing_minimum",
            "self_adjusted_spectrum",
            "vanishing_weights",
            "functional_relevance",
        ),
    },
    "petrov2025": {
        "LN": ("layer_norm_jacobian", "layer_norm_hessian"),
        "FFN": ("relu_is_flat", "mixed_blocks_are_exchanged"),
        "attention": ("attention_blocks",),
        **_named(
            "Thm ",
            range(1, 8),
            "keys_are_missing_from_the_maximum",
            "layer_norm_jacobian",
            "layer_norm_hessian scale_derivative_lacks_a_root",
            "block_chain_rule",
            "blocks_are_not_each_others_equals",
            "block_bound_is_exceeded",
            "taylor_needs_a_remainder",
        ),
        "norm lemmas": (
            "norm_lemma_needs_the_deviation",
            "norm_lemma_has_a_term_of_wrong_degree",
        ),
        "loss difference and its null": (
            "slope_tells_curvature",
            "slope_of_running_means",
            "model_before_data",
        ),
        "figures on trained models": (
            "values_dominate_queries",
            "curvature_of_attention_grows",
            "model_sizes",
        ),
        **_named(
            "item ",
            range(1, 17),
            "keys_are_missing_from_the_maximum",
            "softmax_is_not_flat query_jacobian_does_not_shrink_with_length",
            "norm_lemma_needs_the_deviation norm_lemma_has_a_term_of_wrong_degree",
            "scale_derivative_lacks_a_root",
            "uniform_attention_is_curved",
            "mixed_block_does_not_vanish_with_w2 mixed_blocks_are_exchanged",
            "blocks_are_not_each_others_equals",
            "softmax_second_derivative_is_not_its_largest_block",
            "taylor_needs_a_remainder",
            "slope_of_running_means",
            "feedforward_curvature_is_small",
            "activation_of_the_experiments_bends",
            "gradient_sums_stall_in_bfloat16",
            "which_block_is_largest_depends_on_the_input",
            "constants_disagree value_curvature_is_quadratic_in_the_input",
            "deviation_is_not_a_singular_value",
        ),
    },
    "baek": {
        "κ_score": ("score_ratio_is_at_least_one", "score_term_is_a_product"),
        "κ_softmax": (
            "kappa_softmax_sees_a_common_offset",
            "power_iterations_read_low",
        ),
        "κ(V)": ("value_condition_misleads",),
        "κ_eff": ("weight_condition_misleads", "prediction_is_vacuous"),
        "C_LN, ρ_LN": ("epsilon_does_not_set_the_error", "norm_coefficient_is_loose"),
        "ε_mach": ("two_roundoffs",),
        "unified bound": ("prediction_is_vacuous", "not_unitless"),
        "residual relaxation": ("residual_does_not_relax", "gain_is_not_small"),
        **_named(
            "Exp. ",
            range(1, 4),
            "v1_tracks_the_error collapse_is_the_format four_points_have_no_small_p",
            "independent_curves_pass",
            "intervention_never_fires epsilon_rule_lowers_the_loss",
        ),
        "BGSS": (
            "bgss_moves_little",
            "bgss_lowers_the_worst_error",
            "events_of_three_seeds",
            "cap_never_binds",
            "analytic_checks",
            "v2_tracks_the_error",
        ),
        **_named(
            "5.",
            range(1, 15),
            "intervention_never_fires",
            "independent_curves_pass",
            "not_unitless risk_is_not_unitless",
            "row_maximum_is_no_bound",
            "value_condition_misleads",
            "epsilon_does_not_set_the_error",
            "prediction_is_vacuous gain_is_not_small",
            "collapse_is_the_format",
            "tf32_reference_understates",
            "residual_does_not_relax",
            "norm_ratio_is_no_transport",
            "token_mean_variance_hides_small_tokens",
            "bgss_moves_little ranking_prefers_where_epsilon_acts_least "
            "layer_ranks_need_a_null",
            "zeros_hide_failures",
        ),
    },
}
"""What the four papers state, by our notes on them → the checks that judge it."""


@pytest.mark.parametrize("paper", COVERED)
def test_every_statement_of_a_paper_has_a_check(paper: str) -> None:
    known = {i.split(".")[1] for i in CLAIMS if i.startswith(paper)}
    judged = {row["claim"].split(".")[1] for row in VERDICTS}
    for statement, checks in COVERED[paper].items():
        assert checks and set(checks) <= known, f"{paper}, {statement}"
        assert set(checks) <= judged, f"{paper}, {statement}: run claims_sabotage"
    listed = {check for checks in COVERED[paper].values() for check in checks}
    assert known == listed, "a check that no statement asks for"


def test_a_refutation_is_confirmed_or_says_why_it_cannot_be() -> None:
    wrong = {r["claim"] for r in VERDICTS if r["verdict"] in WRONG}
    assert wrong - COUNTEREXAMPLES.keys() == NOT_ALGEBRAIC.keys()
    assert all(len(why.split()) > 3 for why in NOT_ALGEBRAIC.values())
    assert confirmation("baek2025.zeros_hide_failures") in NOT_ALGEBRAIC.values()
    assert confirmation("emadi2026.peaked_bound") == BY_HAND
    assert confirmation("emadi2026.balanced_mass") == ""
