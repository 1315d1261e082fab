"""What the autopilot does after an alarm: apply, follow, keep, withdraw, log, stop."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from equipoise.autopilot.options import Autopilot, Proposal, read_autopilot
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from tests.autopilot.judged import ALARM, TinyGPT, Training

QUICK: dict[str, Any] = {"apart": 5, "probation": 3, "snapshot_every": 5}
RATE = "a tenth of the rate"


def alarmed(**options: Any) -> Training:
    """Return a training whose alarm sounds at step 30, and which went on for one."""
    found = Training(Autopilot(**{**QUICK, **options}))
    found.run([2.0] * 30)
    found.run([3.0], size=2.0)
    return found


def test_no_alarm_no_change() -> None:
    found, alone = Training(Autopilot(**QUICK)), Training(Autopilot(memory=0))
    found.run([2.0] * 40)
    alone.run([2.0] * 40)
    assert not found.events and found.weights() == alone.weights()
    assert str(alone.pilot) == "autopilot: nothing was done"
    assert "step 0: snapshots: roll-back: 8 snapshots of" in str(found.pilot)


def test_an_alarm_goes_back_and_applies_what_fits() -> None:
    found = alarmed()
    assert found.events == ["applied"]
    text = str(found.pilot)
    assert "step 30: applied: back to step 10, then a tenth of the rate" in text
    assert "test.alarm: value = 2" in text and "no shadow trial" in text
    weights = Training(Autopilot(memory=0))
    weights.run([2.0] * 10)
    assert found.weights() == weights.weights()  # those of step 10
    assert found.pilot.state.active == [RATE]
    # No later rollback may lead into the steps that were taken back.
    assert [snapshot.step for snapshot in found.pilot.snapshots.kept][-1] == 10
    # A tenth of the rate, after a warm-up: the first step is a 21st of that.
    moved = found.weights()
    found.run([2.0])
    far = max(abs(a - b) for a, b in zip(moved, found.weights(), strict=True))
    assert 0 < far < 0.01 / 15


def test_a_treatment_that_helps_is_kept() -> None:
    found = alarmed()
    found.run([2.0] * 3)
    assert found.events == ["applied", "kept"]
    assert found.pilot.state.active == [RATE] and found.pilot.state.course is None


def test_a_loss_below_zero_is_compared_too() -> None:
    """A loss with other terms, such as a load balance, may be negative."""
    found = Training(Autopilot(**QUICK))
    found.run([-2.0] * 30)
    found.run([3.0], size=2.0)
    found.run([-2.0] * 3)
    assert found.events == ["applied", "kept"]


@pytest.mark.parametrize("loss", [2.2, float("nan")])
def test_a_treatment_that_harms_is_withdrawn(loss: float) -> None:
    found = alarmed()
    found.run([loss] * 3)
    assert found.events == ["applied", "withdrawn"]
    assert not found.pilot.state.active and found.pilot.state.failed == [RATE]
    weights = Training(Autopilot(memory=0))
    weights.run([2.0] * 10)
    assert found.weights() == weights.weights()  # from before the treatment again
    # The schedule's full rate would throw them away again: it begins anew.
    moved = found.weights()
    found.run([2.0])
    far = max(abs(a - b) for a, b in zip(found.weights(), moved, strict=True))
    assert 0 < far < 0.1 / 10
    state = found.pilot.state_dict()
    assert state["warming"]["step"] == 1
    found.pilot.load_state_dict(json.loads(json.dumps(state)), found.optimizer)
    assert found.pilot.state_dict()["warming"]["step"] == 1
    found.run([2.0] * 21)
    assert not found.optimizer._optimizer_step_pre_hooks


def test_a_roll_back_without_a_slower_rate_warms_up_too() -> None:
    found = Training(Autopilot(**QUICK))
    found.optimizer.param_groups[0]["eps"] = 1e-3
    found.run([2.0] * 30)
    found.run([3.0], size=2.0)
    assert found.pilot.state.active == ["usual Adam settings"]
    before = found.weights()
    found.run([2.0])
    far = max(abs(a - b) for a, b in zip(found.weights(), before, strict=True))
    assert 0 < far < 0.1 / 10


def test_weights_of_another_optimiser_are_not_treated() -> None:
    """Only what was given can be slowed and rolled back."""
    found = Training(Autopilot(**QUICK))
    found.optimizer = AdamW([found.model.weight], lr=0.1)
    found.run([2.0] * 30)
    found.run([3.0], size=2.0)
    assert found.events == ["dry run", "would apply"]


def test_it_waits_until_the_way_back_is_covered() -> None:
    found = alarmed(back=10)  # to step 20, so until step 40
    found.run([2.0] * 5, size=2.0)
    found.run([2.0] * 3)
    found.run([2.0] * 4, size=2.0)  # steps 39 to 42; fired while settling: muted
    assert found.events == ["applied", "kept"]
    found.run([2.0])
    found.run([3.0], size=2.0)
    assert found.events == ["applied", "kept", "applied"]


@pytest.mark.parametrize(("loss", "events"), [(2.05, []), (3.0, ["applied"])])
def test_a_run_at_its_best_is_left_alone(loss: float, events: list[str]) -> None:
    found = Training(Autopilot(**QUICK))
    found.run([2.0] * 30)
    found.run([loss] * 4, size=2.0)
    assert found.events[:1] == events


class Encoder(nn.Linear):
    """Not known to be a causal language model."""


@pytest.mark.parametrize(
    ("model", "optimizer", "classes", "events"),
    [
        (TinyGPT, AdamW, None, ["applied"]),
        (TinyGPT, SGD, None, ["dry run", "would apply"]),
        (Encoder, AdamW, None, ["dry run", "would apply"]),
        (TinyGPT, AdamW, 1000, ["dry run", "would apply"]),  # 2.0 is far below ln 1000
    ],
)
def test_where_it_was_not_tried_it_only_says_what_it_would_do(
    model: type[nn.Linear], optimizer: Any, classes: int | None, events: list[str]
) -> None:
    found = Training(Autopilot(**QUICK))
    found.model = found.pilot.model = model(3, 2)
    found.optimizer = optimizer(found.model.parameters(), lr=0.1)
    found.judge = Judge({"classes": classes}, rules=[ALARM])
    found.run([2.0])
    assert found.events == events[:-1]  # at the first sample
    found.run([2.0] * 29)
    found.run([3.0], size=2.0)
    assert found.events == events
    anyway = Training(Autopilot(**QUICK, untried=True))
    anyway.model = anyway.pilot.model = model(3, 2)
    anyway.optimizer = optimizer(anyway.model.parameters(), lr=0.1)
    anyway.run([2.0] * 30)
    anyway.run([3.0], size=2.0)
    assert anyway.events == ["applied"]


def test_the_budget_ends() -> None:
    found = alarmed(most=1)
    found.run([2.0] * 40)
    found.run([2.0] * 3, size=2.0)
    assert found.events == ["applied", "kept"]


def test_how_far_it_may_go_back_is_bounded() -> None:
    found = alarmed(back=7)
    assert "back to step 25" in str(found.pilot)
    none = alarmed(memory=0)
    assert "back to" not in str(none.pilot) and none.events == ["applied"]


def test_a_dry_run_changes_nothing_and_says_what_it_would_do() -> None:
    found, alone = alarmed(dry_run=True), Training(Autopilot(memory=0, dry_run=True))
    alone.run([2.0] * 31)
    assert found.events == ["would apply"]
    assert "back to step 10" in str(found.pilot)
    assert found.weights() == alone.weights()
    assert not found.optimizer._optimizer_step_pre_hooks


def test_a_person_is_asked() -> None:
    asked: list[Proposal] = []

    def later(proposal: Proposal) -> bool | None:
        asked.append(proposal)
        return None if len(asked) == 1 else True

    found = alarmed(ask=later)
    assert found.events == [] and len(asked) == 1
    found.run([3.0], size=2.0)
    assert found.events == ["applied"] and len(asked) == 2
    first = asked[0]
    assert first.treatment == RATE and first.back_to == 10 and first.step == 30
    assert first.remedies == {"learning_rate": {"scale": 0.1, "warmup": 20}}


def test_a_person_may_decline() -> None:
    found = alarmed(ask=lambda proposal: False)
    found.run([3.0] * 5, size=2.0)
    assert found.events == ["declined"]
    assert not found.optimizer._optimizer_step_pre_hooks


def test_bad_batches_are_left_out_until_the_loss_is_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _always(monkeypatch, "leave out bad batches")
    found = alarmed()
    assert "back to step 30" in str(found.pilot)  # a spike is seen at once
    # The batches are at fault: a trial on others says nothing, and none is made.
    assert "shadow trial" not in str(found.pilot)
    held = found.weights()
    found.run([5.0] * 20)
    assert found.weights() == held and found.events == ["applied"]
    found.run([2.1] * 4)
    assert found.events == ["applied", "withdrawn"] and found.weights() == held
    found.run([2.0])
    assert found.weights() != held


def test_batches_that_stay_unusual_are_the_new_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _always(monkeypatch, "leave out bad batches")
    monkeypatch.setattr("equipoise.autopilot.pilot.PATIENCE", 10)
    found = alarmed()
    found.run([5.0] * 10)
    assert found.events == ["applied", "withdrawn"]
    assert found.pilot.state.failed == ["leave out bad batches"]


def test_a_remedy_that_refuses_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _always(monkeypatch, "balance the experts")
    found = alarmed()
    assert found.events == ["refused"] and "no router" in str(found.pilot)
    alone = Training(Autopilot(memory=0))
    alone.run([2.0] * 31)
    assert found.weights() == alone.weights()
    assert found.pilot.state.failed == ["balance the experts"]


def test_lost_weights_need_a_snapshot() -> None:
    found = Training(Autopilot(**QUICK, memory=0))
    found.run([2.0] * 30)
    found.run([float("nan")] * 2)
    assert found.events == ["stopped"] and found.pilot.stopped
    saved = Training(Autopilot(**QUICK))
    saved.run([2.0] * 30)
    saved.run([float("nan")])
    assert saved.events == ["applied"]


def test_ranks_that_do_not_agree_do_nothing() -> None:
    found = Training(Autopilot(**QUICK))
    found.pilot._agree = lambda text: None
    found.run([2.0] * 30)
    found.run([3.0] * 2, size=2.0)
    assert found.events == []


def test_it_goes_back_only_where_every_rank_can() -> None:
    found = Training(Autopilot(**QUICK))
    other = json.dumps({"held": [0, 25], "chosen": None})
    found.pilot._agree = lambda text: [text, other]
    found.run([2.0] * 30)
    found.run([3.0], size=2.0)
    assert found.events == ["applied"] and "back to" not in str(found.pilot)


def test_the_first_rank_decides_for_all() -> None:
    first, second = Training(Autopilot(**QUICK)), Training(Autopilot(**QUICK))
    said: list[str] = []

    def record(text: str) -> list[str]:
        said.append(text)
        return [text]

    first.pilot._agree = record
    for one in (first, second):
        one.run([2.0] * 30)
        one.pilot.pop_findings()
    first.run([3.0], size=2.0)
    second.pilot._first_rank = False
    second.pilot._agree = lambda text: [said[0], text]
    second.run([3.0], size=2.0)
    assert first.weights() == second.weights()
    assert str(first.pilot) == str(second.pilot)
    assert first.pilot.pop_findings() and not second.pilot.pop_findings()


def test_a_checkpoint_carries_log_budget_and_what_is_active() -> None:
    found = alarmed()
    found.run([2.0] * 2)
    state = json.loads(json.dumps(found.pilot.state_dict()))
    saved = copy.deepcopy([found.model.state_dict(), found.optimizer.state_dict()])
    resumed = Training(Autopilot(**QUICK))
    resumed.run([2.0] * 1)
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.pilot.load_state_dict(state, resumed.optimizer)
    resumed.judge, resumed.step = found.judge, found.step
    assert resumed.weights() == found.weights()
    assert str(resumed.pilot) == str(found.pilot)
    assert resumed.pilot.state.used == 1
    found.run([2.0])
    resumed.judge = found.judge
    resumed.run([2.0])
    assert resumed.weights() == found.weights()  # the warm-up goes on where it stood
    assert resumed.pilot.state.active == [RATE]


def test_weights_that_were_loaded_are_not_treated_again() -> None:
    """A treatment that scales weights once did so before the checkpoint."""
    found = Training(Autopilot(**QUICK))
    found.run([2.0])
    given = found.pilot.state_dict()
    given["state"]["active"], given["progress"] = ["smaller weights"], [[{}]]
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.mul_(100.0)  # far above the cap
    loaded = found.weights()
    found.pilot.load_state_dict(given, found.optimizer)
    assert found.pilot.state.active == ["smaller weights"]
    assert found.weights() == loaded


def test_what_watch_takes() -> None:
    assert read_autopilot(None) is None and read_autopilot(True) == Autopilot()
    asked = read_autopilot(lambda proposal: True)
    assert asked is not None and asked.ask is not None
    with pytest.raises(InputError, match="autopilot='maybe': give True"):
        read_autopilot("maybe")
    with pytest.raises(InputError, match="most=0 must be 1 or more"):
        Autopilot(most=0)
    with pytest.raises(InputError, match="loss=3 must be a function"):
        Autopilot(loss=3)  # type: ignore[arg-type]


def _always(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have one treatment fit everything, and no other fit anything."""
    from equipoise.autopilot.treatments import BY_NAME

    def candidates(found: object, *, failed: list[str], active: object) -> Any:
        return [] if name in failed else [BY_NAME[name]]

    monkeypatch.setattr("equipoise.autopilot.pilot.candidates", candidates)
