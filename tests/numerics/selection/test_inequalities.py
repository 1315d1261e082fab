"""A seeded subsample of the 10⁵ trials of ``benchmarks.selection_bounds``."""

import pytest
import torch

from tests.numerics.selection.trials import INEQUALITIES


@pytest.mark.parametrize("name", INEQUALITIES)
def test_no_trial_breaks_it(name: str) -> None:
    inequality = INEQUALITIES[name]
    params = inequality.start(256, torch.Generator().manual_seed(0))
    small, large = inequality.sides(params)
    assert small.shape == large.shape and len(small) >= 256
    assert inequality.violations(params) == 0
