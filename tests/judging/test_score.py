"""The forecast: features, curves, bets, causes; the same live and from a file."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from equipoise.judging.causes import REMEDIES, Band, Causes, Layers, StableCourse
from equipoise.judging.features import (
    ALARMING,
    NAMES,
    NUMBERS,
    Course,
    Sample,
    described,
)
from equipoise.judging.remedy_catalogue import CATALOGUE
from equipoise.judging.score import ARMED, Forecaster, Model, model_from, shipped

BLOCKS = ("b.0", "b.1", "b.2")


def sample(
    step: int,
    *,
    logit: float = 2.0,
    theta: float = 0.9,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    fresh: bool = True,
) -> Sample:
    table = {
        "attention.theta.p5": {"a.0": [theta, theta]},
        "attention.max_logit": {"a.0": [logit, logit], "a.1": [logit, logit]},
        "gradient.norm": {"b.0": [3.0], "b.1": [1.0], "b.2": [4.0]},
        "gradient.qk": {"a.0": [0.5], "a.1": [0.5]},
        "weight.norm": {b: [w] for b, w in zip(BLOCKS, weights, strict=True)},
        "update.norm": {b: [0.01] for b in BLOCKS},
    }
    return Sample(step, table, BLOCKS, fresh=fresh)


def features(course: Course, one: Sample) -> dict[str, float]:
    return dict(zip(NAMES, course.add(one).tolist(), strict=True))


def test_features_are_levels_growth_since_the_start_and_trends() -> None:
    course = Course()
    found = [features(course, sample(5 * n, logit=2.0 * 2**n)) for n in range(9)]
    ln2 = math.log(2)
    assert found[0]["max logit, level"] == pytest.approx(ln2)
    assert math.isnan(found[1]["max logit, growth"])  # no start yet
    # The start is the median of the first three: 2, 4, 8.
    assert found[8]["max logit, growth"] == pytest.approx(7 * ln2)
    assert math.isnan(found[5]["max logit, trend"])
    assert found[8]["max logit, trend"] == pytest.approx(6 * ln2)
    assert found[8]["max logit, speed"] == pytest.approx(2 * ln2)
    assert found[0]["first to last, level"] == pytest.approx(math.log(3 / 4))
    share = math.log(0.5) - math.log(math.sqrt(26))
    assert found[0]["queries and keys, level"] == pytest.approx(share)
    assert found[0]["update, level"] == pytest.approx(math.log(0.01))
    assert math.isnan(found[8]["router load, level"])  # not read: NaN, not 0


@pytest.mark.parametrize("every", [5, 10, 40])
def test_changes_are_per_step_however_often_one_samples(every: int) -> None:
    course = Course()
    for n in range(18):
        found = features(course, sample(every * n, logit=math.exp(0.01 * every * n)))
    assert found["max logit, speed"] == pytest.approx(0.1)  # ten steps' worth
    assert found["max logit, trend"] == pytest.approx(0.3)


def test_a_jump_is_not_steady_and_a_ramp_is() -> None:
    """Weights stay, so the update's ratio is the update's norm."""

    def last(move: Callable[[int], float]) -> float:
        course = Course()
        for n in range(20):
            one = sample(5 * n)
            norms = {b: [0.01 * math.exp(move(n))] for b in BLOCKS}
            table = {**one.table, "update.norm": norms}
            found = features(course, replace(one, table=table))
        return found["update, steady"]

    assert last(lambda n: float(n > 12)) == pytest.approx(0.0)
    assert last(lambda n: 0.1 * n) == pytest.approx(0.8)


def test_the_level_of_theta_counts_only_for_a_fresh_model() -> None:
    fresh, trained = (
        features(Course(), sample(0, fresh=given)) for given in (True, False)
    )
    assert fresh["theta, level"] == pytest.approx(math.log(0.9))
    assert math.isnan(trained["theta, level"])


def test_no_feature_is_a_setting_or_the_loss() -> None:
    quantities = {number.quantity for number in NUMBERS.values()}
    assert not quantities & {"learning_rate", "loss"}
    assert described("update, level", math.log(0.02)) == "update 0.02"


COUNT, WATCHED = len(NAMES), len(ALARMING)
PLACE = NAMES.index("theta, growth")


def toy() -> Model:
    """A band of reach 1 around 0 for every reading.

    Two bins, inside and outside, with odds 1/2 and 4 whatever came before.
    """
    course = {"ages": [], "centre": [[0.0] * COUNT], "scale": [[1.0] * COUNT]}
    band = {"ages": [], "centre": [[0.0] * WATCHED], "reach": [[1.0] * WATCHED]}
    return model_from(
        {
            "course": course,
            "band": band,
            "edges": [0.0],
            "log_odds": [[math.log(0.5), math.log(4.0)]] * 3,
            "run_length": 60.0,
            "steps": [150.0, 40.0],
        }
    )


def test_the_score_is_how_far_the_farthest_reading_is_out() -> None:
    model = toy()
    x = np.full(COUNT, math.nan)
    assert model.score(x, 0) == pytest.approx(math.log(0.05))  # nothing read
    x[PLACE] = 1.5
    assert model.score(x, 0) == pytest.approx(math.log(0.05))  # the harmless side
    x[PLACE] = -1.5
    assert model.score(x, 0) == pytest.approx(math.log(1.5))
    assert model.probability(0.0) == 0.5 and model.probability(1e9) <= 1


def test_a_band_is_one_of_the_runs_age() -> None:
    band = Band(
        ages=[20],
        centre=[[0.0] * WATCHED] * 2,
        reach=[[1.0] * WATCHED, [4.0] * WATCHED],
    )
    x = np.full(COUNT, math.nan)
    x[PLACE] = -2.0
    assert band.outside(x, 19).max() == 2.0 and band.outside(x, 20).max() == 0.5


def test_readings_are_compared_with_stable_ones_of_their_age() -> None:
    course = StableCourse(
        ages=[5], centre=[[0.0] * COUNT, [2.0] * COUNT], scale=[[1.0] * COUNT] * 2
    )
    x = np.full(COUNT, 2.0)
    assert course.standardised(x, 4)[0] == 2.0 and course.standardised(x, 5)[0] == 0.0
    assert course.standardised(100 * x, 0)[0] == 4.0  # cut off


def test_the_stake_multiplies_and_never_falls_below_one() -> None:
    forecaster = Forecaster(toy())
    quiet = [forecaster.add(sample(n)) for n in range(12)]
    assert quiet[-1].stake == pytest.approx(math.log(0.5) / math.log(60))
    assert not any(found.alarm for found in quiet)
    loud = [
        forecaster.add(sample(12 + n, theta=0.9 * math.exp(-2.0))) for n in range(4)
    ]
    # 4 · 4 · 4 = 64 passes 60 at the third reading, and stays.
    assert [found.alarm for found in loud] == [False, False, True, True]
    assert loud[2].expected == 40.0
    name, value, far = max(
        loud[2].reasons, key=lambda reason: reason[0] == "theta, growth"
    )
    assert (name, value, far) == ("theta, growth", pytest.approx(-2), pytest.approx(2))
    assert loud[2].probability > 0.6


def test_nothing_is_bet_before_growth_has_a_start() -> None:
    forecaster = Forecaster(toy())
    for n in range(ARMED):
        assert forecaster.add(sample(n, theta=0.9 / 9**n)).stake == 0


def test_fair_odds_keep_the_run_length() -> None:
    """On a stable Markov chain, the mean number of bets to an alarm is A or more."""
    rng = np.random.default_rng(0)
    stable = np.array([[0.95, 0.05], [0.6, 0.4]])
    failing = np.array([[0.7, 0.3], [0.2, 0.8]])
    odds, length = np.log(failing / stable), 50.0
    lengths = []
    for _ in range(200):
        state, stake, count = 0, 0.0, 0
        while stake < math.log(length) and count < 5000:
            now = int(rng.random() > stable[state, 0])
            stake = max(stake, 0.0) + odds[state, now]
            state, count = now, count + 1
        lengths.append(count)
    assert np.mean(lengths) >= length


def test_the_block_that_moved_away_is_named() -> None:
    layers = Layers()
    for n in range(8):
        layers.add(sample(n, weights=(1.0, 1.0 + 0.2 * n, 1.01)))
    assert layers.site == "b.1" and layers.distances["b.1"] > 0.5
    assert layers.began_apart == ""  # at the start they were alike


def test_the_block_that_began_apart_is_named() -> None:
    layers = Layers()
    for n in range(8):
        layers.add(sample(n, weights=(1.0, 1.1 + 0.2 * n, 3.0)))
    assert layers.site == "b.1" and layers.began_apart == "b.2"


def test_the_cause_is_told_by_the_readings_of_20_steps_after_the_alarm() -> None:
    """Two causes that differ by one feature's side: the mean since the alarm tells."""
    weights = np.zeros((2, COUNT))
    weights[:, NAMES.index("logits, growth")] = 1.0, -1.0
    causes = {"families": ["ramp", "init"], "weights": weights, "offsets": [0.0, 0.0]}
    forecaster = Forecaster(replace(toy(), causes=Causes(**causes)))
    for n in range(8):
        quiet = forecaster.add(sample(5 * n))
    assert quiet.cause == "" and quiet.causes == () and quiet.site == ""
    saturated = 0.9 * math.exp(-3.0)

    def add(n: int, logit: float) -> str:
        return forecaster.add(sample(5 * n, theta=saturated, logit=logit)).cause

    # Not yet an alarm: the latest reading alone. Third reading outside: the alarm.
    assert [add(8, 2.2), add(9, 1.8), add(10, 4.0)] == ["ramp", "init", "ramp"]
    # ln 2 at the alarm outweighs a small opposite reading, not four of them.
    assert [add(11, 1.3), add(12, 1.3)] == ["ramp", "init"]
    assert [add(13, 1.3), add(14, 1.3)] == ["init", "init"]
    # Later readings change nothing any more, until the stake is lost.
    assert add(15, 1e6) == "init"
    for n in range(16, 30):
        over = forecaster.add(sample(5 * n))
    assert over.stake <= 0 and over.cause == ""


def test_what_left_the_band_is_kept_with_its_step() -> None:
    forecaster = Forecaster(toy())
    for n in range(8):
        forecaster.add(sample(n))
    assert forecaster.left == {}
    forecaster.add(sample(8, theta=0.9 * math.exp(-1.5)))
    assert forecaster.left == {"theta, level": 8, "theta, growth": 8}


def test_causes_rank_by_features_in_standard_deviations() -> None:
    count = len(NAMES)
    weights = np.zeros((2, count))
    weights[1, 0] = 2.0
    causes = Causes(
        families=["ramp", "logit growth"], weights=weights.tolist(), offsets=[0.5, 0.0]
    )
    s = np.zeros(count)
    assert causes.ranked(s)[0][0] == "ramp"
    s[0] = 3.0
    assert [name for name, _ in causes.ranked(s)] == ["logit growth", "ramp"]
    assert sum(share for _, share in causes.ranked(s)) == pytest.approx(1, abs=1e-3)


def test_every_cause_has_remedies_of_the_catalogue() -> None:
    model = shipped()
    assert model.causes is not None
    assert set(model.causes.families) <= set(REMEDIES)
    assert all(name in CATALOGUE for names in REMEDIES.values() for name in names)


def test_the_shipped_coefficients_are_whole() -> None:
    model = shipped()
    assert model.run_length >= 2000
    causes = model.causes
    assert causes is not None and len(causes.families) == len(causes.weights)
    assert all(len(row) == COUNT for row in causes.weights)
    for rows in (model.band.centre, model.band.reach):
        assert len(rows) == len(model.band.ages) + 1
        assert all(len(row) == WATCHED for row in rows)
    assert min(v for row in model.band.reach for v in row) > 0
    assert len(model.course.centre) == len(model.course.ages) + 1
    bins = len(model.edges) + 1
    assert len(model.log_odds) == bins + 1 and len(model.steps) == bins
    assert all(len(row) == bins for row in model.log_odds)
    assert not {"no warm-up", "residual"} & set(model.made_by["families"])
    assert model_from(json.loads(model.to_json())) == model
