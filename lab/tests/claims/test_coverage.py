"""Every statement that the four papers make has a check, one by one."""

import json
from pathlib import Path

import pytest

from equipoise_lab.claims import catalogue
from equipoise_lab.claims.coverage import sections
from equipoise_lab.claims.exact import (
    BY_HAND,
    COUNTEREXAMPLES,
    NOT_ALGEBRAIC,
    confirmation,
)
from equipoise_lab.claims.result import OURS, WRONG

CLAIMS = [claim.id for claim in catalogue.select()]
VERDICTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/claims_sabotage.json").read_text()
)["rows"]


def _named(prefix: str, numbers: range, *claims: str) -> dict[str, tuple[str, ...]]:
    """Return a line for every number: the claims that cover it, words by a space."""
    lines = (tuple(line.split()) for line in claims)
    return {f"{prefix}{n}": line for n, line in zip(numbers, lines, strict=True)}


COVERED: dict[str, dict[str, tuple[str, ...]]] = {
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


SECTIONS = (
    *("Abstract 1 2 3 3.1 3.2 4 5 5.1 5.2 5.3 5.4 6 6.1 6.2 6.3 7 8 A B").split(),
    *("C.1 C.2 C.3 C.4 C.5 D.1 D.2 E.1 E.2 E.3 E.4 E.5 E.6").split(),
    *(f"Figure {n}" for n in range(1, 7)),
    "Table 1",
)
"""Every heading, figure and table of the main paper."""


def test_no_section_of_the_main_paper_is_empty() -> None:
    table = sections()
    assert [one.section for one in table] == list(SECTIONS)
    known = {i.split(".")[1]: i for i in CLAIMS if i.startswith("emadi2026.")}
    where = {c.id.split(".")[1]: c.where for c in catalogue.select(paper="emadi")}
    for one in table:
        assert bool(one.checks) != bool(one.why), one.section
        assert len(one.says) > 20 and {*one.checks, *one.ours} <= known.keys()
        assert not any(where[name].startswith(OURS) for name in one.checks)
        assert all(where[name].startswith(OURS) for name in one.ours)
    listed = {name for one in table for name in (*one.checks, *one.ours)}
    assert listed == known.keys()


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
