"""The verdicts on Emadi's layer bounds, recomputed."""

from equipoise.claims import emadi_bounds


def test_gelu_is_steeper_than_one() -> None:
    verdict = emadi_bounds.activation_constant()
    assert verdict.outcome == "fails"
    measured = verdict.evidence["measured between 1.40 and 1.43"]
    assert 1.128 < measured <= verdict.evidence["constant of GELU"] < 1.1290


def test_a_measured_theta_does_not_bound_a_step_across() -> None:
    verdict = emadi_bounds.measured_theta_is_local()
    assert verdict.outcome == "corrected"
    assert verdict.evidence["theta at x"] < 1e-6
    assert verdict.evidence["bound with theta at x"] < 1.001
    assert verdict.evidence["change of output per change of input"] > 9.9


def test_a_query_bias_escapes_the_input_magnitude() -> None:
    verdict = emadi_bounds.biases_are_not_in_the_magnitude()
    assert verdict.outcome == "corrected"
    assert verdict.evidence["bound with B of the input"] < 1.001
    assert verdict.evidence["local constant"] > 1.19
