"""Every closed form against a forward pass differentiated twice, and known points."""

import pytest

from lab.tests.theory.curvature_draws import TRIALS

# Two float64 ways of one number; the largest Hessians here are made of some 1e3 terms.
TOLERANCE = 1e-10


@pytest.mark.parametrize("name", TRIALS)
def test_closed_form_matches_autograd(name: str) -> None:
    errors = [error for seed in range(20) for error in TRIALS[name](seed)]
    assert max(errors) < TOLERANCE
