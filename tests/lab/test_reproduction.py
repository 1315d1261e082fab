"""A page made again from a clean folder shows the same numbers.

``theorem`` is made at its published size. Its errors are a CPU's last bits: there the
size is compared, everywhere else every digit that the page shows. Training differs
between CPUs in its last bits and then in all of them, so a small experiment is trained
twice here, in two clean folders.
"""

import json
from pathlib import Path
from typing import Any

from equipoise.claims.emadi import theorem_evidence
from equipoise.lab.models import GPTConfig
from equipoise.lab.results import publishing
from equipoise.lab.results.evidence import Evidence, gather
from equipoise.lab.running.execution import execute
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LAST_BITS = 1e-12
"""Errors of a few roundings of numbers near 1."""


def _numbers(evidence: Evidence) -> dict[str, Any]:
    return json.loads(evidence.to_json())["runs"]  # type: ignore[no-any-return]


def test_a_published_page_comes_out_again() -> None:
    made = _numbers(theorem_evidence())
    kept = json.loads((RESULTS / "theorem" / publishing.RAW).read_text())["runs"]
    assert made.keys() == kept.keys()
    for arm, seeds in kept.items():
        for seed, values in seeds.items():
            for name, value in values.items():
                again = made[arm][seed][name]
                shown = f"{again:.4g}" == f"{value:.4g}"
                assert shown or max(value, again) < LAST_BITS, (arm, seed, name)


def test_training_from_two_clean_folders_gives_one_page(tmp_path: Path) -> None:
    shape = GPTConfig(width=16, depth=2, heads=2, context=16)
    train = TrainOptions(steps=12, batch=4, warmup=2, every=4)
    experiment = Experiment(
        name="again",
        question="Is it the same again?",
        arms=(Arm(name="a", model=shape, train=train),),
        seeds=(1, 2),
        curves=("loss", "gradient.norm"),
    )
    pages = []
    for name in ("first", "second"):
        for task in experiment.tasks:
            execute(task, tmp_path / name)
        evidence = gather(experiment, tmp_path / name)
        folder = tmp_path / f"{name}-page"
        text = publishing.publish(evidence, folder).read_text()
        cost = next(line for line in text.splitlines() if line.startswith("- Cost"))
        pages.append((_numbers(evidence), text.replace(cost, "")))
    assert pages[0] == pages[1]
