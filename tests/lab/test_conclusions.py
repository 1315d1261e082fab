"""A conclusion says what the numbers say, whichever way they fall."""

import math
from dataclasses import replace

import pytest

from equipoise.errors import InputError
from equipoise.lab.conclusions import conclusion
from equipoise.lab.fits import largest_that_trains, power_law, rank_correlation
from equipoise.lab.published import EMADI, beside, comparison
from equipoise.lab.recipes import recipe
from equipoise.lab.results import Row
from equipoise.lab.statistics import summary

PREPOST = recipe("prepost", quick=True)


def row(arm: str, **values: float) -> Row:
    return Row(
        arm=arm,
        values={name: summary([value]) for name, value in values.items()},
        against_first=None,
        seeds=(1,),
    )


def test_the_prepost_sentence() -> None:
    pre = row("pre", validation=2.5, gradient_spread=6.0)
    post = row("post", validation=3.0, gradient_least_to_last=1e-6)
    said = conclusion(PREPOST, [pre, post])
    assert "1.0e-06" in said and "factor of 6" in said
    assert "pre-LN ends 0.50 nats per token below post-LN" in said


def test_a_pattern_that_does_not_appear_is_not_claimed() -> None:
    pre = row("pre", validation=2.5)
    healthy = row("post", validation=2.0, gradient_least_to_last=0.5)
    said = conclusion(PREPOST, [pre, healthy])
    assert "do not learn" not in said and "post-LN ends 0.50" in said
    assert "not both finished" in conclusion(PREPOST, [pre])
    assert "not recorded" in conclusion(PREPOST, [row("pre"), row("post")])
    other = replace(PREPOST, name="other")
    assert conclusion(other, [pre]) == "nothing to compare yet."


def test_the_papers_numbers_stand_beside_ours() -> None:
    like = {"validation": 1.0, "S_residual": 1e5, "S_residual_cv": 0.9, "spikes": 0.0}
    unlike = {"validation": 2.0, "S_residual": 1e3, "S_residual_cv": 0.4, "spikes": 1.0}
    lines = beside([row("pre", **like), row("post", **unlike)])
    assert len(lines) == 4 and {line[3] for line in lines} == {"holds"}
    lines = beside([row("pre", **unlike), row("post", **like)])
    assert {line[3] for line in lines} == {"does not hold here"}
    every = {pattern.measure: 1.0 for pattern in EMADI}
    shown = comparison([row("pre", **every), row("post", **every)])
    assert shown.row_count == len(EMADI)
    assert beside([row("pre", **like)]) == []


def test_exponents_are_fitted_to_the_edge_of_training() -> None:
    """Arms that train up to gain 8·(6/N) have exponent -1 over N = 6, 24."""
    experiment = recipe("exponents", quick=True)
    rows = [
        row(a.name, validation=2.0 if a.model.gain * a.model.depth <= 48 else 9.0)
        for a in experiment.arms
    ]
    said = conclusion(experiment, rows)
    assert said.count("exponent -1.00") == 3
    assert "(predicted -0.25)" in said and "(predicted -0.50)" in said
    assert "too few depths" in conclusion(experiment, rows[:1])


def test_rates_are_ranked_against_the_start() -> None:
    experiment = recipe("rates", quick=True)
    edge = {"pre": 1e-1, "post": 1e-3, "pre-gain2": 1e-2}
    S = {"pre": 1.0, "post": 9.0, "pre-gain2": 3.0}
    rows = []
    for arm in experiment.arms:
        shape = arm.name.rsplit("-lr", 1)[0]
        loss = 2.0 if arm.train.lr <= edge[shape] else math.nan
        rows.append(row(arm.name, validation=loss, S_start=S[shape]))
    said = conclusion(experiment, rows)
    assert "post 0.001" in said and "Rank correlation with S: -1.00" in said


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 2.0, 2.0: 2.1, 4.0: 9.0}, 2.0),
        ({1.0: 2.0, 2.0: 9.0, 4.0: 2.0}, 1.0),  # luck beyond the edge
        ({1.0: 9.0, 2.0: 2.0, 4.0: math.nan}, 2.0),  # too small fails too
        ({1.0: math.nan}, None),
    ],
)
def test_the_edge(losses: dict[float, float], expected: float | None) -> None:
    assert largest_that_trains(losses) == expected


def test_power_laws() -> None:
    law = power_law([1, 2, 4, 8], [3.0, 1.6, 0.7, 0.4])
    assert law.exponent == pytest.approx(-0.99, abs=0.05) and 0 < law.error < 0.1
    assert math.isnan(power_law([1, 2], [1, 2]).error)
    for x, y in (([1, 1], [1, 2]), ([1, 2], [0, 1]), ([1], [1])):
        with pytest.raises(InputError, match="two positive points"):
            power_law(x, y)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 15]) == pytest.approx(0.5)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
