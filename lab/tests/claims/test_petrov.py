"""The verdicts on Petrov et al., recomputed."""

import pytest

from equipoise_lab.claims import petrov_attention, petrov_block


def test_keys_grow_while_theorem_1_stays() -> None:
    result = petrov_attention.keys_are_missing_from_the_maximum()
    assert result.verdict == "refuted"
    found = result.evidence
    assert found["bound at W_Q = I"] == found["bound at W_Q = 1000·I"]
    small, large = (
        found[f"norm of the KK block at W_Q = {t}"] for t in ("I", "1000·I")
    )
    assert large == pytest.approx(1e6 * small, rel=1e-9)


def test_softmax_jacobian_is_a_half() -> None:
    result = petrov_attention.softmax_is_not_flat()
    assert result.verdict == "corrected"
    assert result.evidence["at (1/2, 1/2, 0, ...)"] == pytest.approx(0.5)
    assert result.evidence["at a uniform row"] == pytest.approx(1 / 32)


def test_query_jacobian_exceeds_its_bound_by_half_the_length() -> None:
    result = petrov_attention.query_jacobian_does_not_shrink_with_length()
    assert result.verdict == "refuted"
    assert result.evidence["norm"] > 10 * result.evidence["claimed"]


def test_uniform_attention_has_a_second_derivative() -> None:
    result = petrov_attention.uniform_attention_is_curved()
    assert result.verdict == "refuted"
    assert result.evidence["norm of Φ_QQ at W_Q = 0"] > 0.1
    assert result.evidence["norm of Φ_VQ at W_Q = 0"] > 1


def test_blocks_of_softmax_are_stacked() -> None:
    result = petrov_attention.softmax_second_derivative_is_not_its_largest_block()
    assert result.verdict == "corrected"
    top = result.evidence["supremum over rows"]
    assert result.evidence["unfolded"] == pytest.approx(top)
    assert result.evidence["unfolded"] > 1.4 * result.evidence["largest block"]


def test_values_do_not_always_dominate() -> None:
    result = petrov_attention.which_block_is_largest_depends_on_the_input()
    assert result.verdict == "partly"
    found = result.evidence
    assert found["V at scale 0.3"] > max(
        found["Q at scale 0.3"], found["K at scale 0.3"]
    )
    assert found["V at scale 3.0"] < max(
        found["Q at scale 3.0"], found["K at scale 3.0"]
    )


def test_values_bend_with_the_square_of_the_input() -> None:
    result = petrov_attention.value_curvature_is_quadratic_in_the_input()
    assert result.verdict == "corrected"
    assert result.evidence["exponent measured"] == pytest.approx(2)


def test_theorem_6_is_exceeded_and_ours_is_not() -> None:
    result = petrov_block.block_bound_is_exceeded()
    assert result.verdict == "corrected"
    found = result.evidence
    assert found["claimed"] < found["norm of the KK block"] <= found["ours"]


def test_norm_lemma_with_row_norms_is_false() -> None:
    result = petrov_block.norm_lemma_needs_the_deviation()
    assert result.verdict == "corrected"
    assert result.evidence["norm of the Jacobian"] == pytest.approx(1)
    assert result.evidence["claimed"] < 0.4
    assert result.evidence["claimed with the standard deviation"] > 1


def test_norm_lemma_mixes_degrees() -> None:
    result = petrov_block.norm_lemma_has_a_term_of_wrong_degree()
    assert result.verdict == "corrected"
    falls = [v for key, v in result.evidence.items() if key.startswith("fall of")]
    assert falls == [pytest.approx(1e4), pytest.approx(1e2)]


def test_printed_scale_derivative_is_a_root_too_large() -> None:
    result = petrov_block.scale_derivative_lacks_a_root()
    assert result.verdict == "corrected"
    assert result.evidence["printed over true at d = 4"] == pytest.approx(2)


def test_mixed_block_survives_w2_zero() -> None:
    result = petrov_block.mixed_block_does_not_vanish_with_w2()
    assert result.verdict == "refuted"
    assert result.evidence["norm"] > 0.5


def test_unfolded_blocks_have_different_shapes() -> None:
    assert petrov_block.blocks_are_not_each_others_equals().verdict == "refuted"


def test_gelu_bends_where_relu_does_not() -> None:
    result = petrov_block.activation_of_the_experiments_bends()
    assert result.verdict == "refuted"
    assert result.evidence["norm of (W_1, W_1) with ReLU"] == 0
    assert result.evidence["norm of (W_1, W_1) with GELU"] > 0.1


def test_taylor_without_remainder_is_exceeded() -> None:
    result = petrov_block.taylor_needs_a_remainder()
    assert result.verdict == "refuted"
    assert result.evidence["bound at k = 1, w = 1"] == 0
    assert result.evidence["difference"] == 0.5


def test_random_numbers_have_the_slope_of_fig_6() -> None:
    result = petrov_block.slope_of_running_means()
    assert result.verdict == "refuted"
    assert result.evidence["slope of uniform random numbers"] == pytest.approx(
        -1, abs=0.02
    )


def test_bfloat16_sums_stall() -> None:
    result = petrov_block.gradient_sums_stall_in_bfloat16()
    assert result.verdict == "undecided"
    assert result.evidence["mean of 4096 from a bf16 sum"] < 0.02
