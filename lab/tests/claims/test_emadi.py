"""Emadi (2026) on θ: the verdicts, and the numbers they rest on."""

import pytest
import torch

from equipoise_lab.claims import emadi, published_results
from equipoise_lab.claims.emadi import (
    LENGTHS,
    TEMPERATURES,
    figure3,
    sorted_prefix,
)
from tests.oracles import balance as oracle


def test_peaked_bound() -> None:
    result = emadi.peaked_bound()
    assert result.verdict == "partly"
    assert result.evidence["part: κ ≤ ½"] == 1 and result.evidence["part: κ > ½"] == 0
    assert result.evidence["claimed bound"] == pytest.approx(0.36)
    assert result.evidence["theta"] == 1.0
    assert result.evidence["largest |theta - 4κ(1-κ)| for κ ≤ ½"] < 1e-14


def test_greedy_prefix() -> None:
    """Theory note: 39, 85, 97 and 97 % of rows; 500 draws have a 2 % standard error."""
    result = emadi.greedy_prefix()
    assert result.verdict == "refuted"
    shares = [result.evidence[f"share of rows missed, L = {n}"] for n in (4, 8, 12, 16)]
    assert shares == pytest.approx([0.39, 0.85, 0.97, 0.97], abs=0.07)
    assert 0.05 < result.evidence["largest relative error"] < 0.15


def test_example_row() -> None:
    result = emadi.example_row()
    assert result.verdict == "holds"
    assert result.evidence["theta"] == 1.0
    assert result.evidence["sorted prefix"] == pytest.approx(0.96)


def test_one_throughout() -> None:
    result = emadi.one_throughout()
    assert result.verdict == "refuted"
    assert result.evidence["largest theta of query 0, over heads"] == 0.0
    assert result.evidence["largest theta of query 1, over heads"] < 1.0
    assert result.evidence["largest theta of query 63, over heads"] == pytest.approx(1)


def test_the_heuristic_is_a_lower_bound(rng: torch.Generator) -> None:
    p = torch.randn(200, 9, generator=rng, dtype=torch.float64).softmax(-1)
    truth = torch.from_numpy(oracle.theta(p.numpy()))
    assert (sorted_prefix(p) <= truth + 1e-15).all()


def test_exact_theta_is_the_norm_and_the_heuristic_is_not() -> None:
    points = figure3()
    assert len(points) == len(LENGTHS) * len(TEMPERATURES)
    # K sums of K products, each rounded: K²·ε of a norm that is at most 1/τ.
    assert max(point.theta_error for point in points) < 144 * 2.3e-16
    ordinary = {p.keys: p for p in points if p.tau == 1}
    assert ordinary[8].heuristic_wrong > 0.7 and ordinary[12].heuristic_wrong > 0.9
    assert ordinary[8].heuristic_error > 0.01


def test_gelu_is_steeper_than_one() -> None:
    result = emadi.activation_constant()
    assert result.verdict == "holds with a caveat"
    assert result.evidence["steepest of ReLU"] == pytest.approx(1)
    measured = result.evidence["measured between 1.40 and 1.43"]
    assert 1.128 < measured <= result.evidence["constant of GELU"] < 1.1290


def test_a_measured_theta_does_not_bound_a_step_across() -> None:
    result = emadi.measured_theta_is_local()
    assert result.verdict == "corrected"
    assert result.evidence["theta at x"] < 1e-6
    assert result.evidence["bound with theta at x"] < 1.001
    assert result.evidence["change of output per change of input"] > 9.9


def test_a_query_bias_escapes_the_input_magnitude() -> None:
    result = emadi.biases_are_not_in_the_magnitude()
    assert result.verdict == "corrected"
    assert result.evidence["bound with B of the input"] < 1.001
    assert result.evidence["local constant"] > 1.19


def test_what_is_advised_about_norms_is_what_was_measured() -> None:
    """The sentences say that post-LN ends highest and DeepNorm lowest."""
    result = published_results.pre_norm_ends_lower()
    assert "DeepNorm below pre-LN" in result.practice
    assert result.evidence["pre minus post, to"] < 0
    assert result.evidence["deepnorm minus pre, to"] < 0
