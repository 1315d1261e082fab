"""States, sentences and evidence; the same live as from a file."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Reading, RunInfo
from equipoise.store import RunWriter, open_run
from equipoise.text.render import render
from equipoise.text.verdict_text import worded
from tests.judging.histories import (
    BLOCKS,
    DETAILS,
    SITES,
    falling,
    healthy,
    judged,
    per_site,
)


def test_a_healthy_run_is_called_so_with_what_was_looked_at() -> None:
    verdict = judged(healthy())[0].verdict
    assert verdict.state == "healthy" and verdict.since is None
    assert verdict.coverage["sampled"] == 20 and verdict.step == 199
    now = verdict.coverage["loss_now"]
    assert isinstance(now, float) and 2.4 < now < 2.6 and verdict.lead is None


@pytest.mark.parametrize(("steps", "state"), [(90, "not judged"), (100, "healthy")])
def test_ten_sampled_steps_are_judged(steps: int, state: str) -> None:
    assert judged(healthy(steps))[0].verdict.state == state


def test_a_rule_about_the_model_puts_a_run_at_risk() -> None:
    readings = healthy(gradient=lambda step, layer: 10.0 ** (layer - 3))
    verdict = judged(readings)[0].verdict
    assert verdict.state == "at risk" and verdict.since == 0
    assert verdict.findings[0].code == "gradient.vanished"
    assert verdict.lead is not None
    assert verdict.lead.key == ("gradient.vanished", "blocks.0", 0)


def test_every_finding_that_lasts_says_what_holds_now() -> None:
    """Two rules fire; what each found then is in its finding, what holds is beside."""

    def gradient(step: int, layer: int) -> float:
        return 10.0 ** ((layer - 3) * (1.0 if step < 100 else 1.2))

    def loss(step: int) -> float:
        return falling(step) + 3.0 * (step > 120)

    verdict = judged(healthy(gradient=gradient, loss=loss))[0].verdict
    assert verdict.state == "failing"
    then = {f.code: f for f in verdict.findings if f.severity != "info"}
    assert {"gradient.vanished", "loss.risen"} <= then.keys() == verdict.now.keys()
    now = verdict.now["gradient.vanished"]
    assert now.step == 190 and then["gradient.vanished"].step < 100
    assert float(now.params["value"] or 0) < float(
        then["gradient.vanished"].params["value"] or 0
    )
    assert {"gradient.norm", "loss"} <= set(verdict.quantities)
    assert judged(healthy())[0].verdict.quantities == ()


def test_what_the_first_samples_show_is_reported_once_there_are_ten() -> None:
    course = {"gradient": lambda step, layer: 10.0 ** (layer - 3)}
    judge, found = judged(healthy(90, **course))
    assert not found and judge.verdict.state == "not judged"
    found = judged(healthy(100, **course))[1]
    assert [(f.code, f.step) for f in found] == [("gradient.vanished", 20)]


def test_what_was_over_while_it_was_early_is_not_told() -> None:
    """The first updates of a healthy run are large: no trouble that is over."""
    readings: list[Reading] = []
    for reading in healthy():
        readings.append(reading)
        if reading.quantity == "gradient.norm":
            rows = [[0.05 if reading.step < 40 else 0.001]] * 4
            readings.append(per_site(reading.step, "update.ratio", rows, BLOCKS))
    judge, found = judged(readings)
    assert "update.too_large" not in {f.code for f in found}
    assert judge.verdict.state == "healthy" and not judge.verdict.over


def test_a_rule_about_the_loss_makes_it_failing() -> None:
    def loss(step: int) -> float:
        return 2.9 if step >= 110 else 2.0 + 3.5 * math.exp(-step / 30)

    readings = healthy(loss=loss)
    verdict = judged(readings)[0].verdict
    assert verdict.state == "failing" and 110 <= (verdict.since or 0) < 130


def test_a_failing_run_is_told_by_its_loss_and_by_what_went_wrong_first() -> None:
    """Gradients vanish at the start; a plateau; logits of 1e5 and a loss above chance.

    The logits are graver, but they came later.
    """

    def loss(step: int) -> float:
        return 9.0 if step >= 260 else max(5.52, 5.545 - step / 200)

    readings: list[Reading] = []
    for reading in healthy(
        300, loss=loss, gradient=lambda _, layer: 10.0 ** (layer - 3)
    ):
        readings.append(reading)
        if reading.quantity == "gradient.norm":
            late, step = reading.step >= 200, reading.step
            rows, low = [[1e5 if late else 5.0]] * 4, [[1e-6 if late else 0.9]] * 4
            readings.append(per_site(step, "attention.max_logit", rows, SITES))
            readings.append(per_site(step, "attention.theta.p5", low, SITES))
    verdict = judged(readings)[0].verdict
    assert verdict.state == "dead"
    grave = [f.code for f in verdict.findings if f.severity == "error"]
    assert grave == ["loss.not_falling", "attention.logits_large", "loss.above_chance"]
    assert [f.code for f in verdict.effects] == ["loss.above_chance"]
    assert verdict.lead is not None
    assert verdict.lead.key == ("gradient.vanished", "blocks.0", 0)


@pytest.mark.parametrize("large", ["sampled", "whole"])
def test_logits_of_a_sample_are_judged_beside_those_of_all_rows(large: str) -> None:
    """Long sequences are read by a sample, short ones whole, in one step of one run."""
    readings: list[Reading] = []
    for reading in healthy():
        readings.append(reading)
        if reading.quantity == "gradient.norm":
            of = {
                name: [[500.0 if name == large else 5.0]]
                for name in ("whole", "sampled")
            }
            for place, (name, rows) in enumerate(of.items()):
                quantity = f"attention.max_logit{'.sampled' * (name == 'sampled')}"
                site = SITES[place : place + 1]
                readings.append(per_site(reading.step, quantity, rows, site))
            low = [[0.3], [0.3]]
            readings.append(
                per_site(reading.step, "attention.theta.p5", low, SITES[:2])
            )
    judge, found = judged(readings)
    (only,) = (f for f in found if f.code == "attention.logits_large")
    assert only.site == SITES[0 if large == "whole" else 1]
    last = judge.history.last("attention.max_logit")
    assert last is not None and last.sites == SITES[:2]
    assert judge.history.track("attention.max_logit").count == 20


@pytest.mark.parametrize(
    ("level", "steps", "state"),
    [(5.53, 40, "not judged"), (5.53, 360, "dead"), (5.53, 1500, "dead")]
    # The entropy of single classes: BERT stays there for thousands of steps before it
    # goes on, and what is random half the time has no better loss. Not judged by rules.
    + [(5.2, 360, "healthy"), (3.3, 360, "healthy"), (3.3, 1500, "healthy")],
)
def test_near_chance_for_half_of_the_run_is_dead(
    level: float, steps: int, state: str
) -> None:
    """A plateau after a fall of 1/60 a step from 5.545, which a guess has too."""
    plateau = healthy(steps, loss=lambda step: max(level, 5.545 - step / 60))
    assert judged(plateau)[0].verdict.state == state


def test_a_loss_on_its_way_back_has_not_failed_to_come_back() -> None:
    """A curriculum: few windows learnt by heart, then the whole text."""

    def loss(step: int) -> float:
        late = 2.2 + 0.9 * math.exp(-(step - 100) / 40)
        return falling(step) - step / 200 if step < 100 else late

    assert judged(healthy(300, loss=loss))[0].verdict.state == "healthy"


def spiky(*steps: int) -> Callable[[int], float]:
    return lambda step: 4.5 if step in steps else falling(step)


@pytest.mark.parametrize(
    ("spikes", "params"),
    [
        ((200, 250), {"count": 2, "last": 250}),
        (
            range(140, 400, 40),
            {"count": 7, "last": 380, "apart": 40, "case": "regular"},
        ),
        ((140, 180, 220, 320), {"count": 4, "last": 320}),
        ((200,), {"count": 1, "last": 200, "case": "one"}),
    ],
)
def test_a_healthy_run_says_what_is_over(
    spikes: Iterable[int], params: dict[str, object]
) -> None:
    verdict = judged(healthy(400, loss=spiky(*spikes)))[0].verdict
    assert verdict.state == "healthy" and not verdict.recovered
    assert [(f.code, f.params) for f in verdict.over] == [("loss.spikes", params)]


def test_a_loss_that_jumped_and_came_back_is_told_first() -> None:
    """Random labels for eighty steps: nothing in the model came before the jump."""

    def loss(step: int) -> float:
        return 5.8 if 150 <= step < 230 else falling(step)

    verdict = judged(healthy(400, loss=loss))[0].verdict
    assert verdict.state == "healthy" and verdict.recovered
    (jump,) = verdict.over
    assert (jump.code, jump.step, jump.params["after"]) == ("loss.jumped", 150, 5.8)
    assert 230 <= int(jump.params["back"] or 0) < 300
    assert not judged(healthy(400))[0].verdict.recovered


def test_a_loss_that_jumps_and_trains_on_is_told_beside() -> None:
    """A curriculum: other data from step 200 on, and nothing is wrong."""

    def loss(step: int) -> float:
        later = 0.8 * math.exp(-(step - 200) / 60)
        return falling(step) + (later if step >= 200 else -0.8)

    verdict = judged(healthy(400, loss=loss))[0].verdict
    assert verdict.state == "healthy" and not verdict.recovered
    (jump,) = verdict.over
    assert (jump.code, jump.step) == ("loss.jumped", 200)
    assert "back" not in jump.params


def test_a_jump_after_a_sign_in_the_model_is_not_called_data() -> None:
    def gradient(step: int, layer: int) -> float:
        return 10.0 ** (layer - 3) if 50 <= step < 200 else 0.3

    def loss(step: int) -> float:
        return 5.8 if 150 <= step < 230 else falling(step)

    verdict = judged(healthy(400, loss=loss, gradient=gradient))[0].verdict
    assert verdict.recovered
    over = [(f.code, f.since) for f in verdict.over]
    assert over[0] == ("gradient.vanished", 50)
    assert "loss.jumped" not in {code for code, _ in over}


def test_the_layer_at_fault_is_that_of_now() -> None:
    """Every stream grows in the first block; here it runs away in the third, later."""

    def stream(step: int) -> list[list[float]]:
        early = min(1 + step / 5, 30.0)
        return [
            [10.0],
            [10 * early],
            [10 * early],
            [10 * early * 1.1 ** max(0, step - 90)],
        ]

    readings: list[Reading] = []
    for reading in healthy():
        readings.append(reading)
        if reading.quantity == "gradient.norm":
            step, rows = reading.step, stream(reading.step)
            readings.append(per_site(step, "residual.B", rows, BLOCKS))
            readings.append(per_site(step, "attention.B", [[8.0]] * 4, SITES))
    verdict = judged(readings)[0].verdict
    fired = next(f for f in verdict.findings if f.code == "residual.growing")
    assert (fired.site, verdict.where, verdict.seen) == (
        BLOCKS[0],
        BLOCKS[2],
        BLOCKS[3],
    )


def test_how_a_model_was_made_comes_before_what_it_does() -> None:
    """Saturated from the first sample, because projections began five times too large.

    Both are true since step 0; the start is what one can change.
    """
    readings: list[Reading] = []
    for reading in healthy(theta=lambda step, head: 1e-4):
        readings.append(reading)
        if reading.quantity == "gradient.norm":
            step, flat = reading.step, [[1e-4] * 4] * 4
            readings.append(per_site(step, "attention.theta.p5", flat, SITES))
            gains = [[800.0 + layer] for layer in range(4)]
            readings.append(per_site(step, "projection.G", gains, SITES))
    verdict = judged(readings)[0].verdict
    fired = {f.code for f in verdict.findings if f.severity != "info"}
    assert {"attention.saturated", "attention.projections_large"} <= fired
    assert verdict.lead is not None
    assert verdict.lead.code == "attention.projections_large"


@pytest.mark.parametrize(
    ("setting", "before", "after", "code"),
    [
        ("optimizer.weight_decay", 0.01, 30.0, "setting.grew"),
        ("optimizer.weight_decay", 0.0, 30.0, "setting.moved"),
        ("optimizer.weight_decay", 0.1, 0.0, None),
        ("optimizer.epsilon", 1e-8, 1.0, "setting.grew"),
        ("optimizer.beta2", 0.999, 0.3, "setting.moved"),
        ("optimizer.beta1", 0.9, 0.9995, "setting.moved"),
        ("optimizer.beta1", 0.9, 0.91, None),
        ("optimizer.momentum", 0.9, 0.999, "setting.moved"),
        ("loop.batch_size", 64.0, 4.0, "setting.moved"),
        ("loop.batch_size", 64.0, 24.0, None),
        ("loop.clipping_limit", 1.0, 100.0, "setting.moved"),
        ("loop.loss_scale", 65536.0, 1024.0, "setting.moved"),
        ("loop.loss_scale", 65536.0, 2.0**20, None),
    ],
)
@pytest.mark.parametrize("at", [96, 5])
def test_a_setting_that_moved_comes_in_front(
    setting: str, before: float, after: float, code: str | None, at: int
) -> None:
    """A setting that moves from the first steps on is a schedule, no cause."""

    def readings() -> Iterable[Reading]:
        yield Reading.scalar(0, setting, before)
        for reading in healthy(160):
            if reading.quantity == "loss" and reading.step == at:
                yield Reading.scalar(at, setting, after)
            yield reading
            if reading.quantity == "gradient.norm":
                rows = [[0.1 if reading.step >= 120 else 0.001]] * 4
                yield per_site(reading.step, "update.ratio", rows, BLOCKS)

    verdict = judged(readings())[0].verdict
    cause = verdict.cause
    assert (cause and cause.code) == (code if at == 96 else None)
    back = worded(verdict).advice.startswith("put the ")
    assert back is (cause is not None), "the first remedy fits the cause"
    if cause is not None:
        told = setting.partition(".")[2]
        assert (cause.params["setting"], cause.params["since"]) == (told, at)
        assert render(cause).message.startswith(("the ", "the optimiser's "))


@pytest.mark.parametrize(
    ("rate", "moved"),
    [
        (lambda step: 0.03, False),
        (lambda step: 0.03 * min(1, step / 50), False),
        (lambda step: 0.001 * min(1, step / 20) * 1.05 ** max(0, step - 96), True),
        # A restart comes back to a rate that was there, and is no growth.
        (lambda step: 0.02 * min(1, (step + 1) / 20, 1.1 - step % 100 / 100), False),
        # A jump that stands, one in the middle of a warm-up, and one that is over.
        (lambda step: 0.001 if step < 96 else 0.03, True),
        (lambda step: 0.001 * (step + 1) / 160 * (1 if step < 96 else 50), True),
        (lambda step: 0.03 if 96 <= step < 136 else 0.001, True),
        # It was back long before the trouble began.
        (lambda step: 0.03 if 24 <= step < 40 else 0.001, False),
        # It grew after the trouble began, so it is not the cause.
        (lambda step: 0.001 * 1.05 ** max(0, step - 136), False),
    ],
)
def test_a_rate_that_grew_before_comes_in_front(
    rate: Callable[[int], float], moved: bool
) -> None:
    def readings() -> Iterable[Reading]:
        for reading in healthy(160):
            if reading.quantity == "loss":
                yield Reading.scalar(reading.step, "learning_rate", rate(reading.step))
            yield reading
            if reading.quantity == "gradient.norm":
                rows = [[0.1 if reading.step >= 120 else 0.001]] * 4
                yield per_site(reading.step, "update.ratio", rows, BLOCKS)

    verdict = judged(readings())[0].verdict
    assert verdict.state == "at risk"
    assert verdict.since == (96 if moved else 120)
    assert (verdict.cause is not None) is moved
    if verdict.cause is not None:
        assert verdict.cause.code == "setting.grew"
        assert verdict.cause.params["setting"] == "learning_rate"
        assert worded(verdict).sentence.startswith("the learning rate ")


def test_a_plateau_far_below_chance_is_convergence() -> None:
    assert judged(healthy(400, loss=lambda step: 2.0))[0].verdict.state == "healthy"


def test_a_loss_that_is_not_finite_is_dead_and_a_skipped_batch_is_not() -> None:
    dead = healthy(loss=lambda step: falling(step) if step < 150 else math.nan)
    verdict = judged(dead)[0].verdict
    assert verdict.state == "dead" and verdict.lead is not None
    assert (verdict.lead.code, verdict.lead.step) == ("nonfinite.loss", 150)
    skipped = healthy(loss=lambda step: math.nan if step == 150 else falling(step))
    assert judged(skipped)[0].verdict.state == "healthy"


@pytest.mark.parametrize("left_out", ["loss", "gradient.norm", "attention.theta.p50"])
def test_never_healthy_when_something_important_was_not_read(left_out: str) -> None:
    rest = (reading for reading in healthy() if reading.quantity != left_out)
    verdict = judged(rest)[0].verdict
    reasons = {
        "loss": "no_loss",
        "gradient.norm": "no_gradient",
        "attention.theta.p50": "no_attention",
    }
    assert (verdict.state, verdict.reason) == ("not judged", reasons[left_out])


def test_a_site_that_was_not_read_is_named() -> None:
    judge, _ = judged(healthy())
    gap = Finding.warn(0, "watch.unread.no_scores", site="blocks.2")
    judge.note([gap])
    verdict = judge.verdict
    assert (verdict.state, verdict.reason, verdict.lead) == ("not judged", "gap", gap)


def test_the_same_from_a_file_in_pieces_and_at_once(tmp_path: Path) -> None:
    readings = list(healthy(gradient=lambda step, layer: 10.0 ** (layer - 3)))
    info = RunInfo(name="made", created="2026", version="0", details=dict(DETAILS))
    path = tmp_path / "run.eqp"
    live = Judge(DETAILS)
    with RunWriter(path, info) as writer:
        run = None
        for reading in readings:
            writer.append([reading])
            live.add([reading])
            run = run or open_run(path)
            if reading.step % 50 == 0:
                assert run.verdict == worded(live.verdict)
    assert run is not None
    assert open_run(path).verdict == run.verdict == worded(live.verdict)


def test_a_verdict_survives_json() -> None:
    readings = healthy(gradient=lambda step, layer: 10.0 ** (layer - 3))
    verdict = judged(readings)[0].verdict
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_going_back_to_an_earlier_step_forgets_what_came_after() -> None:
    before = [r for r in healthy(150, loss=lambda s: falling(s) + (s > 80) * 9)]
    judge, _ = judged(before)
    assert judge.verdict.state == "failing"
    judge.add(Reading.scalar(step, "loss", falling(step)) for step in range(60, 200))
    assert judge.verdict.state == "healthy"


def test_rules_that_need_another_preset_are_named_once() -> None:
    judge = Judge(DETAILS)
    found = [f for f in judge.add(healthy(400)) if f.code == "rules.unread"]
    assert len(found) == 1 and found[0].severity == "info"
    idle = str(found[0].params["rules"])
    assert "curvature.beyond_edge" in idle
    assert "attention.sinks" not in idle  # any preset reads it
    assert judge.verdict.state == "healthy"


def test_advice_on_the_learning_rate_gives_its_peak_and_when() -> None:
    def readings() -> Iterable[Reading]:
        for reading in healthy(gradient=lambda step, layer: 10.0 ** (layer - 3)):
            if reading.quantity == "loss":
                rate = 0.004 * min(1.0, (reading.step + 1) / 25)
                yield Reading.scalar(reading.step, "learning_rate", rate)
            yield reading

    advice = worded(judged(readings())[0].verdict).advice
    assert advice.endswith("(learning rate: peak 0.004, reached at step 24)")


def test_where_an_update_broke_the_weights_a_smaller_step_is_advised() -> None:
    judge, _ = judged(healthy())
    broke = Finding.error(300, "nonfinite.update", kind="NaN", parameter="w", rank=0)
    judge.note([broke])
    assert judge.verdict.state == "dead"
    advice = worded(judge.verdict).advice
    assert "checkpoint" in advice and advice.endswith("then lower the learning rate")


def test_a_forecast_of_an_old_file_shows_its_text_and_changes_no_verdict(
    tmp_path: Path,
) -> None:
    info = RunInfo(name="made", created="2026", version="0", details=dict(DETAILS))
    old = Finding.warn(50, "forecast.failure", "it fails soon", cause="adam")
    with RunWriter(tmp_path / "run.eqp", info) as writer:
        writer.append(list(healthy()), findings=[old])
    run = open_run(tmp_path / "run.eqp")
    assert run.findings[0].message == "it fails soon"
    assert run.verdict.state == "healthy" and not run.verdict.cause


def test_a_dead_run_is_told_by_what_went_wrong_before() -> None:
    def readings(*, broken: bool) -> Iterable[Reading]:
        for reading in healthy(200, loss=lambda s: falling(s) if s < 180 else math.nan):
            yield reading
            if broken and reading.quantity == "gradient.norm":
                yield per_site(reading.step, "update.ratio", [[0.1]] * 4, BLOCKS)

    alone = judged(readings(broken=False))[0].verdict
    assert (alone.state, alone.cause) == ("dead", None)
    verdict = judged(readings(broken=True))[0].verdict
    assert verdict.state == "dead" and verdict.lead is not None
    assert verdict.cause is not None and verdict.cause.code == "update.too_large"
    assert worded(verdict).headline.startswith("updates are too large")


@pytest.mark.parametrize(("signs", "cause"), [(False, "loss.jumped"), (True, None)])
def test_a_loss_that_jumps_with_no_sign_in_the_model_is_the_datas(
    signs: bool, cause: str | None
) -> None:
    def readings() -> Iterable[Reading]:
        for reading in healthy(240, loss=lambda s: falling(s) + 2.0 * (s >= 150)):
            yield reading
            if reading.quantity == "gradient.norm":
                late = 0.1 if signs and reading.step >= 100 else 1e-3
                yield per_site(reading.step, "update.ratio", [[late]] * 4, BLOCKS)

    verdict = judged(readings())[0].verdict
    assert verdict.state == "failing"
    assert (verdict.cause and verdict.cause.code) == cause
    if verdict.cause is not None:
        assert verdict.cause.step == 150
        assert "no sign in the model" in worded(verdict).headline


def test_batches_among_others_that_are_as_before_are_named() -> None:
    """Up and down in one step each, several times: no weights go like that."""

    def loss(step: int) -> float:
        bad = step >= 150 and step * 7 % 10 < 6
        return falling(step) + 2.0 * bad

    verdict = judged(healthy(260, loss=loss))[0].verdict
    assert verdict.state == "failing" and verdict.cause is not None
    assert verdict.cause.code == "loss.jumped"
    assert verdict.cause.params["case"] == "several"
    assert "look at those batches" in worded(verdict).headline


def test_a_loss_that_goes_on_rising_is_not_the_batchs() -> None:
    """Steps go up the gradient: each loss is higher than the one before."""

    def loss(step: int) -> float:
        return falling(step) + min(8.0, 0.4 * 1.5 ** max(0, step - 150))

    verdict = judged(healthy(260, loss=loss))[0].verdict
    assert verdict.state in ("failing", "dead") and verdict.cause is None


@pytest.mark.parametrize(("at", "first"), [(90, "check.x"), (150, "update.too_large")])
def test_what_began_first_leads_of_a_check_and_a_rule(at: int, first: str) -> None:
    def readings() -> Iterable[Reading]:
        for reading in healthy(200):
            yield reading
            if reading.quantity == "gradient.norm":
                late = 0.1 if reading.step >= 100 else 1e-3
                yield per_site(reading.step, "update.ratio", [[late]] * 4, BLOCKS)

    judge = judged(readings())[0]
    judge.note([Finding.warn(at, "check.x", since=at)])
    assert judge.verdict.lead is not None
    assert judge.verdict.lead.code == first
    assert {"check.x", "update.too_large"} <= {f.code for f in judge.verdict.findings}
