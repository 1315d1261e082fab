"""The theorem holds on every row; the paper's heuristic does not compute it."""

from equipoise.claims.emadi_theta import LENGTHS, TEMPERATURES, figure3


def test_exact_theta_is_the_norm_and_the_heuristic_is_not() -> None:
    points = figure3()
    assert len(points) == len(LENGTHS) * len(TEMPERATURES)
    # K sums of K products, each rounded: K²·ε of a norm that is at most 1/τ.
    assert max(point.theta_error for point in points) < 144 * 2.3e-16
    ordinary = {p.keys: p for p in points if p.tau == 1}
    assert ordinary[8].heuristic_wrong > 0.7 and ordinary[12].heuristic_wrong > 0.9
    assert ordinary[8].heuristic_error > 0.01
