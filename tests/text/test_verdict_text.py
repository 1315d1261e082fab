"""The words of verdicts: the cause, one number, what to do."""

from equipoise.judging.verdict import Verdict
from equipoise.records import Finding, Scalar
from equipoise.text.verdict_text import worded

RUN: dict[str, Scalar] = {
    "rules": 27,
    "sampled": 40,
    "least": 10,
    "loss_first": 5.5,
    "loss_now": 2.25,
    "rate_peak": 0.3,
    "rate_peak_step": 180,
}
UPDATES = Finding.warn(
    190,
    "update.too_large",
    value=0.05,
    largest=0.07,
    most_in="blocks.2",
    since=150,
    noticed=170,
)
GREW = Finding.info(
    190,
    "setting.grew",
    setting="learning_rate",
    since=140,
    now=0.3,
    peak=0.001,
    peak_step=137,
    times=300.0,
)
ABOVE = Finding.error(
    195,
    "loss.above_chance",
    value=1.2,
    loss=6.6,
    reference=5.545,
    what="what guessing gives",
    since=180,
)
TOO_LARGE = (
    "updates are too large: one step moves 5.00% of the median block's weights, 7.00% "
    "of blocks.2"
)
MOVED = "the learning rate is 300 times its peak of step 137"


def test_a_setting_that_moved_comes_before_the_symptom_and_the_effect_on_the_loss() -> (
    None
):
    found = worded(
        Verdict(
            state="failing", lead=UPDATES, cause=GREW, effects=(ABOVE,), coverage=RUN
        )
    )
    assert found.headline == MOVED
    assert found.because == (
        f"{TOO_LARGE}; the loss is 6.6, above 5.545 (what guessing gives)"
    )
    assert found.sentence == (
        "the loss is 6.6, above 5.545 (what guessing gives) (step 195, since step 180);"
        f" {MOVED}: {TOO_LARGE} (step 190, since step 150, noticed at step 170)"
    )
    assert found.advice == (
        "put the learning rate back to 0.001, and go on from a checkpoint of before "
        "step 140"
    )


def test_without_a_setting_that_moved_the_symptom_is_the_headline() -> None:
    found = worded(Verdict(state="at risk", lead=UPDATES, coverage=RUN))
    assert (found.headline, found.because) == (TOO_LARGE, "")


def test_a_healthy_run_says_what_was_looked_at_and_what_is_over() -> None:
    numbers = "27 rules over 40 sampled steps, none fires{}; smoothed loss 5.5 → 2.25"
    found = worded(Verdict(state="healthy", coverage=RUN))
    assert found.sentence == found.headline == numbers.format("")
    spike = Finding.info(200, "loss.spikes", count=1, last=200, case="one")
    earlier = worded(Verdict(state="healthy", over=(spike,), coverage=RUN))
    again = numbers.format(" any more")
    told = "one spike of the loss at step 200 that came back"
    assert earlier.sentence == f"{again}; earlier: {told}"
    assert (earlier.headline, earlier.because) == (again, f"earlier: {told}")
    params: dict[str, Scalar] = {"loss": 5.0, "best": 2.0, "case": "over"}
    when: dict[str, Scalar] = {"since": 100, "ended": 150, "times": 2}
    rose = Finding.error(110, "loss.risen", **params, **when)
    first = worded(Verdict(state="healthy", over=(rose,), recovered=True, coverage=RUN))
    assert first.sentence == (
        "from step 100 to 150, 2 times: the loss had risen to 5 from 2; over now; "
        f"{again}"
    )


def test_what_is_not_judged_says_why() -> None:
    few = Verdict(state="not judged", reason="few_samples", coverage=RUN)
    assert worded(few).sentence == (
        "40 sampled steps so far: a run is judged from 10 on"
    )
    gap = Finding.warn(0, "watch.unread.no_updates", site="h.0", sites=1)
    unread = worded(Verdict(state="not judged", reason="gap", lead=gap))
    assert unread.sentence.startswith("nothing wrong in what was read, but ")
    packed = worded(
        Verdict(
            state="not judged",
            of="weights",
            reason="packed",
            coverage={"tensors": 0, "unread": 3},
        )
    )
    assert packed.sentence == (
        "3 packed tensors were not read, 0 were: nothing wrong with those"
    )
    assert packed.advice == "audit the model before it is packed"


def test_weights_name_the_gravest_and_count_the_rest() -> None:
    scale = Finding.warn(0, "weights.scale", site="h.3.w", value=5.0, factor=0.2)
    found = worded(
        Verdict(
            state="at risk",
            of="weights",
            lead=scale,
            coverage={"more": 2, "tensors": 9},
        )
    )
    assert found.sentence == "h.3.w is 1/5 of its like in the other layers (and 2 more)"
    assert found.advice.startswith("look for a scale applied twice")


def test_numbers_that_are_not_finite_come_first() -> None:
    lost = Finding.error(7, "nonfinite.update", kind="NaN", parameter="w", rank=0)
    found = worded(Verdict(state="dead", lead=lost, findings=(lost,)))
    assert found.sentence == (
        "non-finite numbers from step 7: NaN first in the weight w (update, rank 0)"
    )
    assert found.advice == (
        "go back to the last checkpoint: the weights are broken already; then lower "
        "the learning rate"
    )
    assert found.findings[0].message and not lost.message
