"""The forecast: features, curves, bets, causes; the same live and from a file."""

import json
import math

import numpy as np
import pytest

from equipoise.forecast.causes import REMEDIES, Causes, Layers, StableCourse
from equipoise.forecast.features import NAMES, NUMBERS, Course, Sample, described
from equipoise.forecast.remedy_catalogue import CATALOGUE
from equipoise.forecast.score import ARMED, Forecaster, Model, model_from, shipped

BLOCKS = ("b.0", "b.1", "b.2")


def sample(
    step: int, *, logit: float = 2.0, weights: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> Sample:
    table = {
        "attention.max_logit": {"a.0": [logit, logit], "a.1": [logit, logit]},
        "gradient.norm": {"b.0": [3.0], "b.1": [1.0], "b.2": [4.0]},
        "gradient.qk": {"a.0": [0.5], "a.1": [0.5]},
        "weight.norm": {b: [w] for b, w in zip(BLOCKS, weights, strict=True)},
        "update.norm": {b: [0.01] for b in BLOCKS},
    }
    return Sample(step, table, BLOCKS)


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
    assert found[0]["first to last, level"] == pytest.approx(math.log(3 / 4))
    share = math.log(0.5) - math.log(math.sqrt(26))
    assert found[0]["queries and keys, level"] == pytest.approx(share)
    assert found[0]["update, level"] == pytest.approx(math.log(0.01))
    assert math.isnan(found[8]["router load, level"])  # not read: NaN, not 0


def test_no_feature_is_a_setting_or_the_loss() -> None:
    quantities = {number.quantity for number in NUMBERS.values()}
    assert not quantities & {"learning_rate", "loss"}
    assert described("update, level", math.log(0.02)) == "update 0.02"


COUNT = len(NAMES)
PLACE = NAMES.index("max logit, growth")


def toy() -> Model:
    """One family, by the largest logit's growth: z = 4·growth - 1.

    Two bins, below and above z = 1, with odds 1/2 and 4 whatever came before.
    """
    weights = [0.0] * COUNT
    weights[PLACE] = 4.0
    trouble = {"families": ["logit growth"], "weights": [weights], "offsets": [-1.0]}
    course = {"ages": [], "centre": [[0.0] * COUNT], "scale": [[1.0] * COUNT]}
    return model_from(
        {
            "course": course,
            "trouble": trouble,
            "edges": [1.0],
            "log_odds": [[math.log(0.5), math.log(4.0)]] * 3,
            "run_length": 60.0,
            "steps": [150.0, 40.0],
        }
    )


def test_the_score_is_a_sum_over_features() -> None:
    model = toy()
    x = np.full(COUNT, math.nan)
    assert model.score(model.standardised(x, 0)) == pytest.approx(-1.0)  # not read: 0
    x[PLACE] = 1.5
    s = model.standardised(x, 0)
    assert model.score(s) == pytest.approx(5.0)
    assert model.contributions(s)["max logit, growth"] == pytest.approx(6.0)
    assert model.probability(0.0) == 0.5 and model.probability(1e9) <= 1


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
    loud = [forecaster.add(sample(12 + n, logit=40.0)) for n in range(4)]
    # 4 · 4 · 4 = 64 passes 60 at the third reading, and stays.
    assert [found.alarm for found in loud] == [False, False, True, True]
    assert loud[2].expected == 40.0 and loud[2].reasons[0][0] == "max logit, growth"
    assert loud[2].probability > 0.9


def test_nothing_is_bet_before_growth_has_a_start() -> None:
    forecaster = Forecaster(toy())
    for n in range(ARMED):
        assert forecaster.add(sample(n, logit=2.0 * 50**n)).stake == 0


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
    assert layers.site == "b.1" and layers.distance > 0.5


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
    for causes in (model.trouble, model.causes):
        assert causes is not None and len(causes.families) == len(causes.weights)
        assert all(len(row) == COUNT for row in causes.weights)
    assert len(model.course.centre) == len(model.course.ages) + 1
    bins = len(model.edges) + 1
    assert len(model.log_odds) == bins + 1 and len(model.steps) == bins
    assert all(len(row) == bins for row in model.log_odds)
    assert not {"no warm-up", "residual"} & set(model.trouble.families)
    assert model_from(json.loads(model.to_json())) == model
