"""The verdicts on Petrov et al., recomputed."""

import pytest

from equipoise.claims import petrov_attention, petrov_block


def test_keys_grow_while_theorem_1_stays() -> None:
    verdict = petrov_attention.keys_are_missing_from_the_maximum()
    assert verdict.outcome == "fails"
    found = verdict.evidence
    assert found["bound at W_Q = I"] == found["bound at W_Q = 1000·I"]
    small, large = (
        found[f"norm of the KK block at W_Q = {t}"] for t in ("I", "1000·I")
    )
    assert large == pytest.approx(1e6 * small, rel=1e-9)


def test_softmax_jacobian_is_a_half() -> None:
    verdict = petrov_attention.softmax_is_not_flat()
    assert verdict.outcome == "fails"
    assert verdict.evidence["at (1/2, 1/2, 0, ...)"] == pytest.approx(0.5)
    assert verdict.evidence["at a uniform row"] == pytest.approx(1 / 32)


def test_query_jacobian_exceeds_its_bound_by_half_the_length() -> None:
    verdict = petrov_attention.query_jacobian_does_not_shrink_with_length()
    assert verdict.outcome == "fails"
    assert verdict.evidence["norm"] > 10 * verdict.evidence["claimed"]


def test_uniform_attention_has_a_second_derivative() -> None:
    verdict = petrov_attention.uniform_attention_is_curved()
    assert verdict.outcome == "fails"
    assert verdict.evidence["norm of Φ_QQ at W_Q = 0"] > 0.1
    assert verdict.evidence["norm of Φ_VQ at W_Q = 0"] > 1


def test_blocks_of_softmax_are_stacked() -> None:
    verdict = petrov_attention.softmax_second_derivative_is_not_its_largest_block()
    assert verdict.outcome == "corrected"
    top = verdict.evidence["supremum over rows"]
    assert verdict.evidence["unfolded"] == pytest.approx(top)
    assert verdict.evidence["unfolded"] > 1.4 * verdict.evidence["largest block"]


def test_values_do_not_always_dominate() -> None:
    verdict = petrov_attention.which_block_is_largest_depends_on_the_input()
    assert verdict.outcome == "fails"
    found = verdict.evidence
    assert found["V at scale 0.3"] > max(
        found["Q at scale 0.3"], found["K at scale 0.3"]
    )
    assert found["V at scale 3.0"] < max(
        found["Q at scale 3.0"], found["K at scale 3.0"]
    )


def test_values_bend_with_the_square_of_the_input() -> None:
    verdict = petrov_attention.value_curvature_is_quadratic_in_the_input()
    assert verdict.outcome == "fails"
    assert verdict.evidence["exponent measured"] == pytest.approx(2)


def test_theorem_6_is_exceeded_and_ours_is_not() -> None:
    verdict = petrov_block.block_bound_is_exceeded()
    assert verdict.outcome == "fails"
    found = verdict.evidence
    assert found["claimed"] < found["norm of the KK block"] <= found["ours"]


def test_norm_lemma_with_row_norms_is_false() -> None:
    verdict = petrov_block.norm_lemma_needs_the_deviation()
    assert verdict.outcome == "fails"
    assert verdict.evidence["norm of the Jacobian"] == pytest.approx(1)
    assert verdict.evidence["claimed"] < 0.4
    assert verdict.evidence["claimed with the standard deviation"] > 1


def test_norm_lemma_mixes_degrees() -> None:
    verdict = petrov_block.norm_lemma_has_a_term_of_wrong_degree()
    assert verdict.outcome == "fails"
    falls = list(verdict.evidence.values())
    assert falls == [pytest.approx(1e4), pytest.approx(1e2)]


def test_printed_scale_derivative_is_a_root_too_large() -> None:
    verdict = petrov_block.scale_derivative_lacks_a_root()
    assert verdict.outcome == "corrected"
    assert verdict.evidence["printed over true at d = 4"] == pytest.approx(2)


def test_mixed_block_survives_w2_zero() -> None:
    verdict = petrov_block.mixed_block_does_not_vanish_with_w2()
    assert verdict.outcome == "fails"
    assert verdict.evidence["norm"] > 0.5


def test_unfolded_blocks_have_different_shapes() -> None:
    assert petrov_block.blocks_are_not_each_others_equals().outcome == "fails"


def test_gelu_bends_where_relu_does_not() -> None:
    verdict = petrov_block.activation_of_the_experiments_bends()
    assert verdict.outcome == "fails"
    assert verdict.evidence["norm of (W_1, W_1) with ReLU"] == 0
    assert verdict.evidence["norm of (W_1, W_1) with GELU"] > 0.1


def test_taylor_without_remainder_is_exceeded() -> None:
    verdict = petrov_block.taylor_needs_a_remainder()
    assert verdict.outcome == "fails"
    assert verdict.evidence["bound at k = 1, w = 1"] == 0
    assert verdict.evidence["difference"] == 0.5


def test_random_numbers_have_the_slope_of_fig_6() -> None:
    verdict = petrov_block.slope_of_running_means()
    assert verdict.outcome == "fails"
    assert verdict.evidence["slope of uniform random numbers"] == pytest.approx(
        -1, abs=0.02
    )


def test_bfloat16_sums_stall() -> None:
    verdict = petrov_block.gradient_sums_stall_in_bfloat16()
    assert verdict.outcome == "fails"
    assert verdict.evidence["mean of 4096 from a bf16 sum"] < 0.02
