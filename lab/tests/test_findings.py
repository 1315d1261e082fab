"""A finding says what the numbers say, whichever way they fall."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from equipoise.errors import InputError
from equipoise_lab.results.evidence import Evidence, varied
from equipoise_lab.results.statistics import power_law, rank_correlation
from equipoise_lab.running.experiment import Experiment
from equipoise_lab.studies.catalogue import QUESTIONS, finding, recipe
from equipoise_lab.studies.exponents import edge, interval
from equipoise_lab.studies.prepost import EMADI, Pattern, beside, judged, parts
from equipoise_lab.studies.rates import edges, left_out, score

Answers = Mapping[str, float]
Run = Callable[[Any, int], Answers]
"""(arm, seed) → what it measured."""


def evidence(experiment: Experiment, run: Run, **changes: Any) -> Evidence:
    """Return an experiment's evidence with every run's numbers made up."""
    given: dict[str, Any] = {
        "name": experiment.name,
        "question": experiment.question,
        "measures": experiment.measures,
        "seeds": experiment.seeds,
        "arms": varied(experiment.arms),
        "baselines": experiment.baselines,
        "runs": {
            arm.name: {seed: dict(run(arm, seed)) for seed in experiment.seeds}
            for arm in experiment.arms
        },
    }
    return Evidence(**given | changes)


def prepost(**by_arm: Answers) -> Evidence:
    """Three seeds that differ by a thousandth: intervals are narrow, not points."""
    runs = {
        arm: {
            seed: {k: v * (1 + seed / 1000) for k, v in found.items()}
            for seed in (1, 2, 3)
        }
        for arm, found in by_arm.items()
    }
    full = recipe("prepost", quick=True)
    return evidence(full, lambda arm, seed: {}, runs=runs, seeds=(1, 2, 3))


def test_the_prepost_sentence() -> None:
    found = prepost(
        pre={"validation": 2.5, "gradient_spread": 6.0},
        post={"validation": 3.0, "gradient_least_to_last": 1e-6},
    )
    said = finding(found).verdict
    assert "1.0e-06" in said and "factor of 6" in said
    assert "pre-LN ends 0.50 nats per token below post-LN" in said
    assert "Of 1 published patterns 1 hold" in said


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (2.4, "gradient, and it ends 0.10 nats below pre-LN."),
        (2.6, "gradient, and it ends 0.10 nats above pre-LN."),
        (2.5, "gradient; its loss cannot be told from pre-LN's"),
    ],
)
def test_deepnorm_is_compared_with_pre_norm(loss: float, says: str) -> None:
    deep = {"validation": loss, "gradient_least_to_last": 0.54}
    found = prepost(pre={"validation": 2.5}, post={"validation": 3.0}, deepnorm=deep)
    assert f"DeepNorm's weakest layer gets 0.54 of the last layer's {says}" in (
        finding(found).verdict
    )


def test_a_pattern_that_does_not_appear_is_not_claimed() -> None:
    pre = {"validation": 2.5}
    healthy = {"validation": 2.0, "gradient_least_to_last": 0.5}
    said = finding(prepost(pre=pre, post=healthy)).verdict
    assert "do not learn" not in said and "post-LN ends 0.50" in said
    assert "Of 1 published patterns 0 hold at this scale, 1 do not" in said
    assert "not both finished" in finding(prepost(pre=pre)).verdict
    assert "not recorded" in finding(prepost(pre={}, post={})).verdict


def test_the_papers_numbers_stand_beside_ours() -> None:
    like = {"validation": 1.0, "S_residual": 1e5, "S_residual_cv": 0.9, "spikes": 0.0}
    unlike = {"validation": 2.0, "S_residual": 1e3, "S_residual_cv": 0.4, "spikes": 1.0}
    lines = beside(prepost(pre=like, post=unlike))
    assert len(lines) == 4 and {line[-1] for line in lines} == {"holds"}
    lines = beside(prepost(pre=unlike, post=like))
    assert {line[-1] for line in lines} == {"does not hold here"}
    every = {pattern.measure: 1.0 for pattern in EMADI}
    assert len(beside(prepost(pre=every, post=every))) == len(EMADI)
    assert beside(prepost(pre=like)) == []


@pytest.mark.parametrize("pattern", EMADI, ids=lambda p: f"{p.where} {p.measure}")
def test_nothing_in_both_arms_supports_no_pattern(pattern: Pattern) -> None:
    assert judged(pattern, [(0.0, 0.0)] * 3) != "holds"


def test_a_pattern_that_seeds_do_not_agree_on_is_undecided() -> None:
    (loss, *_) = EMADI
    said = judged(loss, [(1.0, 1.3), (1.0, 1.1), (1.0, 0.9), (1.0, 1.2)])
    assert said.startswith("undecided; ") and said.endswith("decide with 80 % power")


def test_without_a_finder_pairs_are_listed() -> None:
    smoke = recipe("smoke")
    noise = {1: 0.0, 2: 0.1, 3: -0.1}
    found = evidence(
        smoke,
        lambda arm, seed: {
            "validation": (2.0 if arm.name == "pre" else 3.0) + noise[seed]
        },
    )
    assert finding(found).verdict.startswith("post minus pre: +1")
    lonely = evidence(smoke, lambda arm, seed: {}, runs={"pre": {1: {}}})
    assert finding(lonely).verdict == "nothing to compare yet."


def test_exponents_are_fitted_to_the_edge_of_training() -> None:
    """Losses that leave the best at gain 4·(6/N)^½ have exponent -½."""
    experiment = recipe("exponents")

    def run(arm: Any, seed: int) -> Answers:
        reach = 7.0 * (6 / arm.model.depth) ** 0.5
        past = max(0.0, math.log(arm.model.gain / reach))
        return {"validation": 2.0 + past * 10, "first_gradient": 1.0 + seed / 1e6}

    found = finding(evidence(experiment, run))
    fits = found.grids[0].cells
    assert [cells[0] for cells in fits] == ["standard", "shared", "linear"]
    for cells in fits:
        assert float(cells[4].split()[0]) == pytest.approx(-0.5, abs=0.08)
        assert cells[5] == "–"  # the gradient never exploded: nothing to fit
    assert "linear (m = 3, 2 in the paper)" in found.verdict
    assert [cells[1:4] for cells in fits] == [
        ["4", "-0.250", "-0.250"],
        ["4", "-0.250", "-0.333"],
        ["3", "-0.333", "-0.500"],
    ]
    assert "standard (m = 4) -0.5" in found.verdict and "outside" in found.verdict
    flat = evidence(experiment, lambda arm, seed: {"validation": 2.0})
    assert "too few depths have an edge" in finding(flat).verdict


@pytest.mark.parametrize(
    ("slope", "start", "says"),
    [
        (0.4, -1.0, "size may be the reason: it rises"),
        (0.0, -1.0, "fails at every width: size is no excuse"),
        (-0.4, 1.5, "at risk: holds and falls"),
        (0.0, 1.0, "holds at every width"),
    ],
)
def test_the_trend_with_width_is_judged(slope: float, start: float, says: str) -> None:
    """θ − 0.99 moves by ``slope`` per doubling of the width."""
    experiment = recipe("sharpening-sizes")

    def run(arm: Any, seed: int) -> Answers:
        doublings = math.log2(arm.model.width / 64)
        over = start + (slope + seed / 1e5) * doublings + seed / 1e4
        return {"theta_p5": 0.99 + over, "sharp_rows": 0.01 - over}

    found = finding(evidence(experiment, run))
    assert {cells[-1] for cells in found.grids[0].cells} == {says}
    assert f"{says} (4)" in found.verdict


def test_needs_of_every_page_of_sizes() -> None:
    """An exponent of -½ at every width; no gradient explodes, so none is fitted."""

    def run(arm: Any, seed: int) -> Answers:
        reach = 7.0 * (6 / arm.model.depth) ** 0.5
        past = max(0.0, math.log(arm.model.gain / reach))
        return {"validation": 2.0 + past * 10, "first_gradient": 1.0 + seed / 1e6}

    found = finding(evidence(recipe("exponents-sizes"), run))
    trains = {c[0]: c[3:] for c in found.grids[1].cells if c[1] == "trains"}
    assert trains.keys() == {"standard", "linear"}
    for cell in itertools.chain(*trains.values()):
        assert float(cell.split()[0]) == pytest.approx(-0.5, abs=0.08)
    assert {c[3] for c in found.grids[1].cells if c[1] == "starts"} == {"–"}

    def one(arm: Any, seed: int) -> Answers:
        return dict.fromkeys(recipe("prepost-sizes").measures, 1.0 + seed / 1e4)

    lines = finding(evidence(recipe("prepost-sizes"), one)).grids[0].cells
    assert len(lines) == sum(len(parts(pattern)) for pattern in EMADI)
    # Claims find a need by its name: two of one name gave one the other's trend.
    assert len({tuple(cells[:2]) for cells in lines}) == len(lines)


def rate_run(early: Callable[[float], float]) -> Run:
    limits = {"pre": 0.03, "post": 0.004, "gain-2": 0.02, "deep": 0.01, "qk-norm": 0.1}

    def run(arm: Any, seed: int) -> Answers:
        shape = arm.name.rsplit("-", 1)[0]
        limit = limits.get(shape, 0.05) * (1 + seed / 1e5)
        past = max(0.0, math.log(arm.train.lr / limit))
        decayed = max(0.0, math.log(arm.train.weight_decay / (1000 * limit)))
        return {"validation": 2.0 + past + decayed, "sharpness": early(limit)}

    return run


def test_a_number_that_is_the_limit_is_recognised() -> None:
    found = evidence(recipe("rates"), rate_run(lambda limit: 38 / limit))
    sharp = score(found, "lr", "sharpness", 1)
    assert sharp.shapes == 8
    assert all(rank < -0.9 for rank in sharp.rank)
    assert all(1 <= factor < 1.5 for factor in sharp.factor)
    said = finding(found).verdict
    assert "largest learning rate can be told" in said
    assert "preconditioned sharpness" in said
    lines = finding(found).grids[1].cells
    (absolute, _) = [cells for cells in lines if "nothing fitted" in cells[0]]
    assert float(absolute[2].split()[0]) < 1.5


def test_too_few_shapes_are_stated() -> None:
    found = evidence(recipe("rates"), rate_run(lambda limit: limit))
    assert "largest learning rate cannot be told" in finding(found).verdict
    bare = evidence(recipe("rates", quick=True), lambda arm, seed: {"validation": 2.0})
    assert edges(bare, "lr", 42) == {}
    assert "too few shapes have an edge" in finding(bare).verdict


def warm_run(gains: Mapping[str, float]) -> Run:
    def run(arm: Any, seed: int) -> Answers:
        _, warmup, _ = arm.name.split("-", 2)
        parts = {
            f"early_{kind}_{group}": 0.25 if (warmup, group) == ("tau", "qk") else 1.0
            for kind in ("gradient", "update")
            for group in ("qk", "vo", "feedforward", "embedding")
        }
        loss = 3.0 - gains[warmup] + (seed % 7) / 1e4 * (1 + gains[warmup])
        return {"validation": loss, "spikes": 0.0, "steps_to_target": math.inf, **parts}

    return run


@pytest.mark.parametrize(
    ("gains", "answer", "clear"),
    [
        (
            {"none": 0, "lr": 0.2, "tau": 0, "both": 0},
            "Temperature warm-up does not",
            6,
        ),
        (
            {"none": 0, "lr": 0.1, "tau": 0.3, "both": 0},
            "Temperature warm-up is not",
            6,
        ),
        ({"none": 0, "lr": 0, "tau": 0, "both": 0}, "Undecided by loss", 0),
    ],
)
def test_warmups_are_compared_setting_by_setting(
    gains: Mapping[str, float], answer: str, clear: int
) -> None:
    found = finding(evidence(recipe("temperature"), warm_run(gains)))
    assert found.verdict.startswith(answer)
    assert f"LR ends below no warm-up in {clear}" in found.verdict
    assert "qk 0.25 and 0.25, vo 1.00 and 1.00" in found.verdict
    assert "Adam divides" not in found.verdict
    losses, sensitivity, speed, norms = found.grids
    assert len(losses.cells) == len(speed.cells) == 6
    assert len(sensitivity.cells) == 8 and len(norms.cells) == 8


def test_vanishing_names_what_the_gradient_was_lost_in() -> None:
    names = ("ln_norm_factors", "ln_branch_factors", "gradient_least_to_last")
    start = dict.fromkeys((f"{n}_start" for n in names), 1.0)
    end = {names[0]: 1.0, names[1]: -9.0, names[2]: 1e-6}
    rest = {"token_cosine_start": 0.1, "token_cosine": 1.0}
    rest |= {"first_qk_start": 1.0, "first_qk": 0.0}
    experiment = recipe("vanishing")
    found = evidence(experiment, lambda arm, seed: {**start, **end, **rest})
    said = finding(found).verdict
    assert "At init the gradient does not vanish" in said
    assert "At the end the gradient vanishes" in said
    assert "larger share is in the branches" in said and "e^-inf" in said
    only = evidence(experiment, lambda arm, seed: {}, runs={"pre": {42: {}}})
    assert finding(only).verdict == "post is not finished yet."


def test_sharpening_says_whether_theta_left_one() -> None:
    experiment = recipe("sharpening")

    def run(arm: Any, seed: int) -> Answers:
        theta = 0.999 if arm.train.lr < 2e-3 else 0.5
        return {"theta_p5_start": 1.0, "theta_p5": theta, "sharp_rows": 0.25}

    said = finding(evidence(experiment, run)).verdict
    assert "lr 0.001: the 5th percentile of θ stays at 1" in said
    assert "lr 0.004: the 5th percentile of θ leaves 1" in said and "25.0%" in said


def test_variants_are_compared_within_their_residual_form() -> None:
    def run(arm: Any, seed: int) -> Answers:
        worse = arm.name == "post-rmsnorm"
        least = 1e-5 if arm.model.residual == "post" else 0.5
        return {
            "validation": 2.0 + worse + seed / 1e5,
            "gradient_least_to_last": least,
        }

    found = evidence(recipe("rmsnorm"), run)
    said = finding(found).verdict
    assert "pre-rmsnorm against pre-layernorm: ends within a hundredth" in said
    assert "post-rmsnorm against post-layernorm: ends higher: +1.000 nats" in said
    assert "weakest ÷ last gradient 1e-05 and 1e-05, ratio 1 [1, 1]: the same" in said
    assert "minus its baseline" in finding(found).grids[0].cells[-1][0]
    better = evidence(
        recipe("experts"),
        lambda arm, seed: {"validation": 2.0 - arm.model.experts + seed / 1e5},
    )
    assert "ends lower" in finding(better).verdict
    assert "gradients were not recorded" in finding(better).verdict


def test_gradients_are_compared_by_an_interval_not_by_a_limit() -> None:
    """0.00085 and 0.0012 lie on both sides of 0.001, and seeds overlap."""
    shares = {"layernorm": (4e-4, 2.3e-3, 9e-4), "rmsnorm": (1.4e-3, 5e-4, 6.5e-4)}

    def run(arm: Any, seed: int) -> Answers:
        share = shares[arm.model.norm][experiment.seeds.index(seed) % 3]
        times = 100 if arm.name == "pre-rmsnorm" else 1
        return {"validation": 2.0 + seed / 1e5, "gradient_least_to_last": times * share}

    experiment = recipe("rmsnorm")
    pre, post = finding(evidence(experiment, run)).verdict.split("post-rmsnorm against")
    assert "cannot be told apart (" in post and "vanish" not in post
    assert ": different." in pre


def test_every_finder_survives_json() -> None:
    found = evidence(recipe("rates", quick=True), rate_run(lambda limit: 1 / limit))
    again = Evidence.from_json(found.to_json())
    assert finding(again) == finding(found)
    assert set(QUESTIONS) >= {"prepost", "theorem"}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 2.0, 2.0: 2.0, 8.0: 3.0}, 4.0),  # half-way, in logarithms
        ({1.0: 2.0, 4.0: 9.0, 16.0: 2.0}, 4.0 ** (0.5 / 7)),  # luck beyond the edge
        ({1.0: 9.0, 2.0: 2.0, 8.0: math.nan}, 4.0),  # too small fails too
        ({1.0: math.nan}, math.nan),
        ({1.0: 2.0, 2.0: 2.1}, math.inf),
    ],
)
def test_the_edge(losses: dict[float, float], expected: float) -> None:
    assert edge(losses, within=0.5) == pytest.approx(expected, nan_ok=True)


def test_intervals_of_what_is_known() -> None:
    assert interval([math.inf, 2.0]) == "+2" and interval([math.nan]) == "–"
    assert math.isnan(left_out({"a": 1.0}, None))


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
