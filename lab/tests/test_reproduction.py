"""A page made again from a clean folder shows the same numbers.

``theorem`` is made at its published size, ``experts`` at that of one seed of two arms:
60 steps of training each. Errors of ``theorem`` are a CPU's last bits: there the size
is compared, everywhere else every digit that the page shows. Weights moved by 2e-7 of
themselves, more than another CPU's rounding, move the numbers of ``experts`` by less
than 1e-6, so one unit in the last digit shown is allowed, where such a digit may turn.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from equipoise_lab.claims.emadi import theorem_evidence
from equipoise_lab.results import publishing
from equipoise_lab.running.execution import execute
from equipoise_lab.studies.catalogue import recipe

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LAST_BITS = 1e-12
"""Errors of a few roundings of numbers near 1."""
SHOWN = 4
"""Digits of a number on a page."""


def _committed(name: str) -> dict[str, Any]:
    held = json.loads((RESULTS / name / publishing.RAW).read_text())
    return held["runs"]  # type: ignore[no-any-return]


def test_a_published_page_comes_out_again() -> None:
    made = json.loads(theorem_evidence().to_json())["runs"]
    kept = _committed("theorem")
    assert made.keys() == kept.keys()
    for arm, seeds in kept.items():
        for seed, values in seeds.items():
            for name, value in values.items():
                again = made[arm][seed][name]
                shown = f"{again:.{SHOWN}g}" == f"{value:.{SHOWN}g}"
                assert shown or max(value, again) < LAST_BITS, (arm, seed, name)


@pytest.mark.parametrize("arm", ["pre-dense", "post-dense"])
def test_a_published_training_comes_out_again(arm: str, tmp_path: Path) -> None:
    experiment = recipe("experts")
    task = next(t for t in experiment.tasks if (t.arm.name, t.seed) == (arm, 42))
    made, kept = execute(task, tmp_path), _committed("experts")[arm]["42"]
    assert kept.keys() == set(experiment.measures)
    for name, value in kept.items():
        unit = 10.0 ** (math.floor(math.log10(value)) + 1 - SHOWN) if value else 0.0
        assert math.isclose(made[name], value, rel_tol=0, abs_tol=unit), name
