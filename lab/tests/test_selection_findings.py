"""What the selection pages say follows from their numbers, whichever way they point."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from docs import choosing
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.studies.catalogue import finding
from equipoise_lab.studies.selection.normalisers import apart, growth, told_apart

DOCS = Path(__file__).parents[2] / "docs"


def published(name: str) -> Evidence:
    raw = DOCS / "results" / name / "raw.json"
    return Evidence.from_json(raw.read_text(encoding="utf-8"))


def test_the_recommendation_follows_from_the_results() -> None:
    page = (DOCS / "choosing-a-normaliser.md").read_text(encoding="utf-8")
    assert page == choosing.page()


def shifted(evidence: Evidence, arm: str, by: float) -> Evidence:
    """Return the evidence with one arm's loss at 4× moved, steadily."""
    base = evidence.runs["softmax"]
    runs = {
        seed: {**run, "loss_4x": base[seed]["loss_4x"] + by + 1e-4 * i}
        for i, (seed, run) in enumerate(evidence.runs[arm].items())
    }
    return replace(evidence, runs={**evidence.runs, arm: runs})


def test_a_rival_that_wins_or_loses_is_named() -> None:
    found = published("selection")
    better, worse = shifted(found, "ssmax", -0.3), shifted(found, "ssmax", 0.3)
    assert "ssmax" in apart(better, "loss_4x", sign=-1)
    assert "ssmax (-0.30) lose less" in finding(better).verdict
    assert "ssmax" in apart(worse, "loss_4x", sign=1)
    assert told_apart(worse, "loss_4x", sign=1) == ["ssmax"]
    assert len(apart(worse, "loss_4x", sign=1)) > 1  # each taken by itself
    alone = replace(found, runs={"softmax": found.runs["softmax"]})
    assert "no rival's loss can be told from it" in finding(alone).verdict
    empty = replace(found, runs={"ssmax": found.runs["ssmax"]})
    assert finding(empty).verdict == "softmax is not finished yet."


def test_growth_is_of_effective_keys() -> None:
    found = published("selection")
    run = {"keys_1x": 2.0, "keys_4x": 6.0}
    assert growth(replace(found, runs={"softmax": {1: run}}), "softmax") == 3.0


def with_curve(evidence: Evidence, name: str, key: str, **values: Any) -> Evidence:
    curves = dict(evidence.curves)
    curves[name] = {**curves[name], key: {**curves[name][key], **values}}
    return replace(evidence, curves=curves)


def patterns(evidence: Evidence) -> dict[str, str]:
    grid = finding(evidence).grids[0]
    return {f"{where} {says}": word for where, says, _, word in grid.cells}


def test_every_pattern_can_hold_and_fail() -> None:
    """The paper's own curves hold every pattern; each one bent fails its own."""
    lengths = [32.0, 64.0, 128.0, 256.0, 512.0]
    ideal = published("selection-paper")
    ideal = with_curve(
        ideal,
        "lengths",
        "d̃",
        x=lengths,
        true=lengths,
        bound=lengths,
        published=[2 * n for n in lengths],
        expected_high=lengths,
    )
    sizes = {"true": [1, 2, 3, 4.0, 4.1], "expected_low": [1, 2, 3, 4.0, 4.0]}
    ideal = with_curve(ideal, "sizes", "d̃", **sizes, expected_high=[1, 2, 3, 4.0, 4.1])
    ideal = with_curve(
        ideal,
        "critical",
        "N",
        x=lengths,
        low=[0.06 * n for n in lengths],
        high=[0.06 * n for n in lengths],
    )
    recall = [1.0, 0.95, 0.9, 0.85, 0.8, 0.8, 0.8, 0.8, 0.8]
    ideal = with_curve(
        ideal,
        "separability",
        "recall",
        mean=recall,
        published_high=[m + 0.01 for m in recall],
        published_low=[0.0] * 9,
    )
    steps = ideal.curves["gradient"]
    y = [1.2, 1.0, 0.1, 0.01, 0.001, 0.0001]
    claimed = [1.5, 1.5, 1.5, 0.25, 0.025, 0.0025]
    for name in steps:
        ideal = with_curve(ideal, "gradient", name, y=y, claimed=claimed)
    assert set(patterns(ideal).values()) == {"holds"}
    assert finding(ideal).verdict.endswith("Not: none.")

    flat = with_curve(ideal, "lengths", "d̃", true=[5.0] * 5, expected_high=[5.0] * 5)
    bent = {
        "grows about linearly": flat,
        "expectation over random": flat,
        "beyond N = 20": with_curve(ideal, "sizes", "d̃", true=[1, 2, 3, 4.0, 8.0]),
        "critical N": with_curve(ideal, "critical", "N", low=[math.nan] * 5),
        "stays between": with_curve(ideal, "separability", "recall", mean=[0.3] * 9),
        "upper bound": with_curve(
            ideal, "separability", "recall", published_high=[0.5] * 9
        ),
        "lower bound": with_curve(
            ideal, "separability", "recall", published_low=[1.1] * 9
        ),
        "like 1/T": with_curve(ideal, "gradient", "ε = 0.001", y=[1.0] * 6),
    }
    for words, evidence in bent.items():
        assert [v for k, v in patterns(evidence).items() if words in k] == [
            "does not hold here"
        ]


def test_a_short_model_cannot_tell() -> None:
    found = published("selection-paper")
    short = with_curve(found, "sizes", "d̃", x=[1.0, 5.0, 10.0])
    assert "cannot be told" in patterns(short).values()
