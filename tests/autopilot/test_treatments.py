"""Evidence → treatment: settings that are plainly wrong first, the rate last."""

from dataclasses import replace

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from equipoise.autopilot.treatments import (
    BY_NAME,
    NOT_BY_RATE,
    TREATMENTS,
    TreatmentEvidence,
    candidates,
    evidence_of,
    level,
)
from equipoise.judging.history import Curve
from equipoise.judging.judge import Judge
from equipoise.judging.remedy_catalogue import CATALOGUE
from equipoise.judging.rules import load_rules
from equipoise.records import Reading
from equipoise.remedies.catalogue import remedy
from tests.autopilot.judged import ALARM

PLAIN = TreatmentEvidence(step=100, since={"update.too_large": 60})
GROWING = replace(PLAIN, since={"residual.growing": 90})
CASES = [
    (PLAIN, "a tenth of the rate"),
    (replace(PLAIN, epsilon=1e-3), "usual Adam settings"),
    (replace(PLAIN, beta2=0.6), "usual Adam settings"),
    (replace(PLAIN, since={"router.collapsed": 5}), "balance the experts"),
    (replace(PLAIN, since={"gradient.spike": 99}), "leave out bad batches"),
    (
        replace(PLAIN, since={"gradient.spike": 99, "update.too_large": 90}),
        "a tenth of the rate",
    ),
    (replace(PLAIN, since={"update.lost": 50}), "exact weights"),
    (replace(PLAIN, since={"residual.embedding_large": 0}), "smaller weights"),
    (replace(PLAIN, since={"attention.saturated": 5}, start=5), "smaller weights"),
    (replace(PLAIN, since={"attention.saturated": 50}), "a tenth of the rate"),
    (GROWING, "hold the weights' norms"),
    (replace(GROWING, rate_grew=True), "a tenth of the rate"),
    (
        replace(GROWING, since={"residual.growing": 9, "update.too_large": 9}),
        "a tenth of the rate",
    ),
    (replace(PLAIN, since={"gradient.vanished": 5}), "a quarter of the rate"),
]


@pytest.mark.parametrize(("found", "name"), CASES)
def test_first_choice(found: TreatmentEvidence, name: str) -> None:
    assert next(candidates(found)).name == name


def test_a_model_that_is_not_too_fast_is_not_slowed() -> None:
    """Adam's settings are still set right; beside another rule the rate is."""
    starved = replace(PLAIN, since={"gradient.qk_starved": 60})
    assert not list(candidates(starved))
    both = replace(PLAIN, since={"gradient.qk_starved": 60, "update.too_large": 90})
    assert next(candidates(both)).name == "a tenth of the rate"
    small = replace(PLAIN, since={"update.too_small": 60}, epsilon=1e-3)
    assert [t.name for t in candidates(small)] == ["usual Adam settings"]
    assert set(load_rules()) >= NOT_BY_RATE


def test_what_failed_is_not_tried_again_and_what_is_active_changes_nothing() -> None:
    found = replace(PLAIN, beta2=0.6)
    names = [t.name for t in candidates(found, failed=["usual Adam settings"])]
    assert names == ["a tenth of the rate"]
    names = [t.name for t in candidates(found, active=["usual Adam settings"])]
    assert names == ["a tenth of the rate"]
    # The rate may be lowered twice.
    again = candidates(PLAIN, active=["a tenth of the rate"])
    assert [t.name for t in again] == ["a tenth of the rate"]
    assert not list(candidates(PLAIN, failed=["a tenth of the rate"]))


def test_every_treatment_is_made_of_remedies_in_the_catalogue() -> None:
    assert list(BY_NAME) == [t.name for t in TREATMENTS]
    for treatment in TREATMENTS:
        for name, options in treatment.remedies.items():
            assert name in CATALOGUE
            assert remedy(name, **options).name == name


def test_settings_and_since_are_read() -> None:
    layer = nn.Linear(1, 1)
    judge = Judge(rules=[ALARM])
    judge.add([Reading.scalar(7, "test.size", 2.0)])
    adam = AdamW(layer.parameters(), eps=0.1, betas=(0.9, 0.5))
    found = evidence_of(judge, adam)
    assert found is not None
    assert (found.epsilon, found.beta2) == (0.1, 0.5)
    assert found.since == {"test.alarm": 7} and found.began == 7
    assert "test.alarm: value = 2" in found.sentence
    plain = evidence_of(judge, SGD(layer.parameters(), lr=0.1))
    assert plain is not None and plain.epsilon == 1e-8


def test_the_loss_alone_is_no_evidence_but_nan_is() -> None:
    adam = AdamW(nn.Linear(1, 1).parameters())
    judge = Judge(rules=[replace(ALARM, about="loss")])
    judge.add([Reading.scalar(0, "test.size", 2.0)])
    assert judge.firing and evidence_of(judge, adam) is None
    judge.add([Reading.scalar(1, "loss", float("nan"))])
    found = evidence_of(judge, adam)
    assert found is not None and found.nonfinite


def test_a_rate_that_grows_is_seen() -> None:
    adam = AdamW(nn.Linear(1, 1).parameters())
    for last, grew in ((1.1, False), (1.3, True)):
        judge = Judge(rules=[ALARM])
        for step in range(40):
            rate = 1.0 if step < 39 else last
            judge.history.add(Reading.scalar(step, "learning_rate", rate))
        judge.add([Reading.scalar(40, "test.size", 2.0)])
        found = evidence_of(judge, adam)
        assert found is not None and found.rate_grew is grew


def test_the_level_of_long_ago_is_a_block_mean() -> None:
    curve = Curve()
    for step in range(400):
        curve.add(step, float(step))
    assert curve.steps[0] > 20
    assert level(curve, 20) == pytest.approx(19.5)  # the block of steps 16 to 23
    assert level(curve, 399) == pytest.approx(394.5)
