"""Spectra of a model, against the dense matrix of the same operator."""

import numpy as np
import pytest

from equipoise.auditing.curvature import (
    Operator,
    density,
    eigenvalues,
    extreme_eigenvalues,
    hessian,
    trace,
)
from equipoise.numerics.spectra.estimate import Search
from tests.auditing.curvature import subjects


@pytest.fixture(scope="module")
def operator() -> Operator:
    return hessian(subjects.gpt(depth=1), subjects.pair())


@pytest.fixture(scope="module")
def truth(operator: Operator) -> np.ndarray:  # type: ignore[type-arg]
    return np.linalg.eigvalsh(operator.dense().numpy())


def test_ends(operator: Operator, truth: np.ndarray) -> None:  # type: ignore[type-arg]
    search = Search(tolerance=1e-6, at_most=600)
    top = eigenvalues(operator, 3, search=search)
    low = eigenvalues(operator, 2, smallest=True, search=search)
    assert np.allclose([e.value for e in top], truth[::-1][:3], atol=1e-6 * truth[-1])
    assert np.allclose([e.value for e in low], truth[:2], atol=1e-6 * truth[-1])
    both = extreme_eigenvalues(operator)
    assert both.largest.lower <= truth[-1] <= both.largest.upper
    assert both.smallest.lower <= truth[0] <= both.smallest.upper


def test_trace_and_density(operator: Operator, truth: np.ndarray) -> None:  # type: ignore[type-arg]
    found = trace(operator, probes=60)
    assert abs(found.value - truth.sum()) <= 4 * found.residual
    mean, error = density(operator, probes=20, steps=20).mean(1)
    assert abs(operator.width * mean - truth.sum()) <= 4 * operator.width * error


def test_asking_for_more_than_there_is() -> None:
    model, batch = subjects.gpt(depth=1), subjects.pair()
    block = hessian(model, batch, parameters=["final_norm.weight"])
    assert len(eigenvalues(block, 9)) == 4
