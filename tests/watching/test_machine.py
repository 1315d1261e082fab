"""One step's life: every phase with every event, the loops there are, random streams.

The machine is pure, so no model is needed: an event goes in, effects come out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.probes.capture import PassCoverage
from equipoise.watching.step.machine import (
    MEASURING,
    OVER,
    USERS_CODE,
    BackwardBegins,
    BackwardEnds,
    Begin,
    Clipped,
    Closed,
    Effect,
    Event,
    Failed,
    ForwardBegins,
    ForwardEnds,
    Gradients,
    Phase,
    ScalerUpdated,
    Step,
    StepCalled,
    UpdateBegins,
    UpdateEnds,
    transition,
)


class Named:
    """Stands for an optimiser, which the machine only tells apart."""


MINE, THEIRS = Named(), Named()
EVENTS: dict[str, Event] = {
    "begin": Begin(4, PassCoverage()),
    "begin off-sample": Begin(4),
    "forward begins": ForwardBegins(),
    "recomputation": ForwardBegins(in_backward=True),
    "forward ends": ForwardEnds(),
    "backward begins": BackwardBegins(),
    "backward ends": BackwardEnds(),
    "a teacher's backward ends": BackwardEnds(reached=False),
    "clipped": Clipped(),
    "scaler left it out": ScalerUpdated(),
    "update begins": UpdateBegins(MINE),
    "update with a closure begins": UpdateBegins(MINE, late_gradients=True),
    "update beside it begins": UpdateBegins(THEIRS, role="same model"),
    "update ends": UpdateEnds(MINE),
    "first of two updates ends": UpdateEnds(MINE, ends_step=False),
    "update beside it ends": UpdateEnds(THEIRS, role="same model"),
    "another optimiser takes over": UpdateEnds(THEIRS, role="same parameters"),
    "a critic's update ends": UpdateEnds(THEIRS, role="another model"),
    "step called": StepCalled(),
    "failed": Failed(),
    "closed": Closed(),
}
# What follows in each phase, in the phases' order: the next phase, and the effects.
# IDLE is off-sample, all others are sampled; what stands for two words and more is
# below the table.
TABLE = """
[begin]
IDLE          ARMED         ARM STORE_BATCH
ARMED         ARMED         DROP ARM STORE_BATCH
OPEN          ARMED         CLOSE DROP ARM STORE_BATCH
FORWARD_DONE  ARMED         DROP ARM STORE_BATCH
BACKWARD_DONE ARMED         DROP ARM STORE_BATCH
UPDATING      ARMED         DROP ARM STORE_BATCH
UPDATED       ARMED         DROP ARM STORE_BATCH
ENDED         ARMED         ARM STORE_BATCH
DETACHED      DETACHED
CLOSED        CLOSED
[begin off-sample]
IDLE          IDLE          STORE_BATCH
ARMED         IDLE          DROP STORE_BATCH
OPEN          IDLE          CLOSE DROP STORE_BATCH
FORWARD_DONE  IDLE          DROP STORE_BATCH
BACKWARD_DONE IDLE          DROP STORE_BATCH
UPDATING      IDLE          DROP STORE_BATCH
UPDATED       IDLE          DROP STORE_BATCH
ENDED         IDLE          STORE_BATCH
DETACHED      DETACHED
CLOSED        CLOSED
[forward begins]
IDLE          IDLE
ARMED         OPEN          OPEN
OPEN          OPEN
FORWARD_DONE  OPEN          OPEN
BACKWARD_DONE OPEN          OPEN
UPDATING      OPEN          OPEN
UPDATED       OPEN          OPEN
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[recomputation]
IDLE          IDLE
ARMED         ARMED
OPEN          OPEN
FORWARD_DONE  FORWARD_DONE
BACKWARD_DONE BACKWARD_DONE
UPDATING      UPDATING
UPDATED       UPDATED
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[forward ends]
IDLE          IDLE
ARMED         ARMED
OPEN          FORWARD_DONE  CLOSE
FORWARD_DONE  FORWARD_DONE
BACKWARD_DONE BACKWARD_DONE
UPDATING      UPDATING
UPDATED       UPDATED
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[backward begins]
IDLE          FORWARD_DONE  CHECK_LOSS
ARMED         FORWARD_DONE  CHECK_LOSS READ_GRAPH SEEK_COMPILED
OPEN          FORWARD_DONE  CLOSE CHECK_LOSS READ_GRAPH
FORWARD_DONE  FORWARD_DONE  CHECK_LOSS READ_GRAPH
BACKWARD_DONE FORWARD_DONE  CHECK_LOSS READ_GRAPH
UPDATING      FORWARD_DONE  CHECK_LOSS READ_GRAPH
UPDATED       FORWARD_DONE  CHECK_LOSS READ_GRAPH
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[backward ends]
IDLE          IDLE
ARMED         ARMED
OPEN          BACKWARD_DONE CLOSE READ_GRADIENTS
FORWARD_DONE  BACKWARD_DONE READ_GRADIENTS
BACKWARD_DONE BACKWARD_DONE READ_GRADIENTS
UPDATING      BACKWARD_DONE READ_GRADIENTS
UPDATED       BACKWARD_DONE READ_GRADIENTS
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[a teacher's backward ends]
IDLE          IDLE
ARMED         ARMED
OPEN          BACKWARD_DONE CLOSE READ_GRADIENTS
FORWARD_DONE  BACKWARD_DONE READ_GRADIENTS
BACKWARD_DONE BACKWARD_DONE
UPDATING      UPDATING
UPDATED       UPDATED
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[clipped]
IDLE          IDLE          CHECK_NORM
ARMED         ARMED         CHECK_NORM READ_GRADIENTS
OPEN          OPEN          CHECK_NORM READ_GRADIENTS
FORWARD_DONE  FORWARD_DONE  CHECK_NORM READ_GRADIENTS
BACKWARD_DONE BACKWARD_DONE CHECK_NORM
UPDATING      UPDATING      CHECK_NORM
UPDATED       UPDATED       CHECK_NORM
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[scaler left it out]
IDLE          IDLE
ARMED         ARMED
OPEN          OPEN
FORWARD_DONE  FORWARD_DONE
BACKWARD_DONE ENDED         END* USER*
UPDATING      ENDED         END* USER*
UPDATED       ENDED         END* USER*
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[update begins]
IDLE          UPDATING      SNAPSHOT
ARMED         UPDATING      READ_GRADIENTS COPY_WEIGHTS SNAPSHOT
OPEN          UPDATING      CLOSE READ_GRADIENTS COPY_WEIGHTS SNAPSHOT
FORWARD_DONE  UPDATING      READ_GRADIENTS COPY_WEIGHTS SNAPSHOT
BACKWARD_DONE UPDATING      COPY_WEIGHTS SNAPSHOT
UPDATING      UPDATING      COPY_WEIGHTS SNAPSHOT
UPDATED       UPDATING      COPY_WEIGHTS SNAPSHOT
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[update with a closure begins]
IDLE          UPDATING      SNAPSHOT
ARMED         UPDATING      COPY_WEIGHTS SNAPSHOT
OPEN          UPDATING      CLOSE COPY_WEIGHTS SNAPSHOT
FORWARD_DONE  UPDATING      COPY_WEIGHTS SNAPSHOT
BACKWARD_DONE UPDATING      COPY_WEIGHTS SNAPSHOT
UPDATING      UPDATING      COPY_WEIGHTS SNAPSHOT
UPDATED       UPDATING      COPY_WEIGHTS SNAPSHOT
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[update beside it begins]
IDLE          IDLE
ARMED         ARMED         COPY_WEIGHTS
OPEN          OPEN          COPY_WEIGHTS
FORWARD_DONE  FORWARD_DONE  COPY_WEIGHTS
BACKWARD_DONE BACKWARD_DONE COPY_WEIGHTS
UPDATING      BACKWARD_DONE COPY_WEIGHTS
UPDATED       UPDATED       COPY_WEIGHTS
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[update ends]
IDLE          ENDED         ADD_RATE END* ACT USER*
ARMED         ENDED         ADD_RATE READ_UPDATE END* ACT USER*
OPEN          ENDED         ADD_RATE CLOSE READ_UPDATE END* ACT USER*
FORWARD_DONE  ENDED         ADD_RATE READ_UPDATE END* ACT USER*
BACKWARD_DONE ENDED         ADD_RATE READ_UPDATE END* ACT USER*
UPDATING      ENDED         ADD_RATE READ_UPDATE END* ACT USER*
UPDATED       ENDED         ADD_RATE READ_UPDATE END* ACT USER*
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[first of two updates ends]
IDLE          UPDATED       ADD_RATE ACT
ARMED         UPDATED       ADD_RATE READ_UPDATE ACT
OPEN          UPDATED       ADD_RATE CLOSE READ_UPDATE ACT
FORWARD_DONE  UPDATED       ADD_RATE READ_UPDATE ACT
BACKWARD_DONE UPDATED       ADD_RATE READ_UPDATE ACT
UPDATING      UPDATED       ADD_RATE READ_UPDATE ACT
UPDATED       UPDATED       ADD_RATE READ_UPDATE ACT
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[update beside it ends]
IDLE          UPDATED
ARMED         UPDATED       READ_UPDATE
OPEN          UPDATED       CLOSE READ_UPDATE
FORWARD_DONE  UPDATED       READ_UPDATE
BACKWARD_DONE UPDATED       READ_UPDATE
UPDATING      UPDATING
UPDATED       UPDATED       READ_UPDATE
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[another optimiser takes over]
IDLE          ENDED         FOLLOW_OPTIMIZER ADD_RATE END* ACT USER*
ARMED         ENDED         FOLLOW_OPTIMIZER ADD_RATE READ_UPDATE END* ACT USER*
OPEN          ENDED         FOLLOW_OPTIMIZER ADD_RATE CLOSE READ_UPDATE END* ACT USER*
FORWARD_DONE  ENDED         FOLLOW_OPTIMIZER ADD_RATE READ_UPDATE END* ACT USER*
BACKWARD_DONE ENDED         FOLLOW_OPTIMIZER ADD_RATE READ_UPDATE END* ACT USER*
UPDATING      UPDATING
UPDATED       ENDED         FOLLOW_OPTIMIZER ADD_RATE READ_UPDATE END* ACT USER*
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[a critic's update ends]
IDLE          IDLE
ARMED         ARMED
OPEN          OPEN
FORWARD_DONE  FORWARD_DONE
BACKWARD_DONE BACKWARD_DONE
UPDATING      UPDATING
UPDATED       UPDATED
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[step called]
IDLE          ENDED         END* USER*
ARMED         ENDED         END* USER*
OPEN          ENDED         CLOSE END* USER*
FORWARD_DONE  ENDED         END* USER*
BACKWARD_DONE ENDED         END* USER*
UPDATING      ENDED         END* USER*
UPDATED       ENDED         END* USER*
ENDED         ENDED
DETACHED      DETACHED
CLOSED        CLOSED
[failed]
IDLE          DETACHED      LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
ARMED         DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
OPEN          DETACHED      CLOSE DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
FORWARD_DONE  DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
BACKWARD_DONE DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
UPDATING      DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
UPDATED       DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
ENDED         DETACHED      DROP LEAVE_LOOP NOTE_FAILURE WRITE_REST REPORT
DETACHED      DETACHED
CLOSED        CLOSED
[closed]
IDLE          CLOSED        LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
ARMED         CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
OPEN          CLOSED        CLOSE DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
FORWARD_DONE  CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
BACKWARD_DONE CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
UPDATING      CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
UPDATED       CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
ENDED         CLOSED        DROP LEAVE NOTE_NO_STEP WRITE_REST SUMMARISE REPORT
DETACHED      CLOSED        LEAVE
CLOSED        CLOSED
"""
END = "ADD_LOSS FINISH CHECK_COVERAGE WRITE ADVANCE"
SHORT = {"END*": END, "USER*": "REPORT CALL_BACK"}


def rows() -> Iterator[tuple[str, Phase, Phase, list[Effect]]]:
    """Yield event, phase, next phase and effects."""
    event = ""
    for line in filter(None, TABLE.splitlines()):
        if line.startswith("["):
            event = line.strip("[]")
            continue
        for short, long in SHORT.items():
            line = line.replace(short, long)
        before, after, *effects = line.split()
        yield event, Phase[before], Phase[after], [Effect[name] for name in effects]


def standing_in(phase: Phase) -> Step:
    """Return a step of a loop with one backward pass that stands in a phase."""
    forward = {Phase.IDLE: 0, Phase.ARMED: 0, Phase.OPEN: 0, Phase.FORWARD_DONE: 1}
    step = Step(3, phase, PassCoverage(), passes=forward.get(phase, 1), ended=1)
    if phase is Phase.IDLE:
        return replace(step, coverage=None)
    done = {} if phase in forward else {"reached": "yes", "gradients": "read"}
    return replace(step, **done)  # type: ignore[arg-type]


def test_the_table_has_every_phase_with_every_event() -> None:
    found = {(event, before) for event, before, *_ in rows()}
    assert found == {(event, phase) for event in EVENTS for phase in Phase}
    assert {type(event) for event in EVENTS.values()} == set(Event.__args__)


@pytest.mark.parametrize(
    ("event", "before", "after", "effects"),
    rows(),
    ids=lambda given: getattr(given, "name", given if isinstance(given, str) else ""),
)
def test_every_phase_with_every_event(
    event: str, before: Phase, after: Phase, effects: list[Effect]
) -> None:
    found, done = transition(standing_in(before), EVENTS[event])
    assert (found.phase, [*done]) == (after, effects)


class Loop:
    """Carries nothing out, but begins the next step where one has ended."""

    def __init__(self, *, sampled: Any = True, source: Any = "hooks") -> None:
        self.sampled, self.source = sampled, source
        self.step, self.done, self.losses = Step(), list[str](), list[Any]()
        self.post(self._begin(0))

    def _begin(self, number: int) -> Begin:
        return Begin(number, PassCoverage() if self.sampled else None, self.source)

    def post(self, *events: Event) -> "Loop":
        for event in events:
            self.step, effects = transition(self.step, event)
            ended = self.step
            for effect in effects:
                self.done.append(effect.name)
                closed = effect is Effect.CLOSE and not isinstance(event, ForwardEnds)
                if closed:  # the window tells that it has closed
                    self.step, none = transition(self.step, ForwardEnds())
                    assert not none
                if effect is Effect.ADVANCE:
                    self.losses.append(ended.losses.total)
                    self.post(self._begin(ended.number + 1))
        return self

    def said(self) -> str:
        """Return the effects since the last call, without those of every step."""
        done, self.done = self.done, []
        every = f"{END} STORE_BATCH CHECK_LOSS READ_GRAPH SNAPSHOT ACT REPORT CALL_BACK"
        return " ".join(name for name in done if name not in every.split())


def loss(value: float) -> Any:
    return torch.tensor(value)


def passed(value: float, **ends: Any) -> tuple[Event, ...]:
    """Return the events of one backward pass."""
    return BackwardBegins(loss(value)), BackwardEnds(loss(value), **ends)


FORWARD = ForwardBegins(), ForwardEnds()
UPDATE = UpdateBegins(MINE), UpdateEnds(MINE)
PLAIN = "OPEN CLOSE READ_GRADIENTS COPY_WEIGHTS ADD_RATE READ_UPDATE ARM"


def sampled_loop() -> Loop:
    loop = Loop()
    assert loop.said() == "ARM"
    return loop


def test_a_plain_step_and_one_off_sample() -> None:
    loop = sampled_loop().post(*FORWARD, *passed(2.0), *UPDATE)
    assert loop.said() == PLAIN and loop.losses == [2.0]
    loop = Loop(sampled=False).post(*FORWARD, *passed(2.0), *UPDATE)
    assert loop.said() == "ADD_RATE" and loop.losses == [2.0]
    assert loop.step.number == 1 and loop.step.ended == 1


def test_micro_batches_add_their_losses_and_are_opened_once() -> None:
    """The window reports the first call alone; gradients are read as they grow."""
    loop = sampled_loop().post(*FORWARD, *passed(1.0), *passed(2.0), *passed(4.0))
    assert loop.said() == "OPEN CLOSE" + " READ_GRADIENTS" * 3
    loop.post(*UPDATE)
    assert loop.losses == [7.0]


def test_several_forwards_before_one_backward() -> None:
    loop = sampled_loop().post(*FORWARD, *FORWARD, ForwardBegins(), *passed(1.0))
    assert loop.said() == "OPEN CLOSE OPEN CLOSE OPEN CLOSE READ_GRADIENTS"


def test_a_loss_computed_after_the_model_returned() -> None:
    loop = sampled_loop().post(*FORWARD)
    assert loop.step.phase is Phase.FORWARD_DONE and loop.said() == "OPEN CLOSE"
    loop.post(*passed(3.0), *UPDATE)
    assert loop.losses == [3.0]


def test_what_is_recomputed_in_a_backward_pass_is_not_measured() -> None:
    again = ForwardBegins(in_backward=True), ForwardEnds(seen=False)
    begin, end = passed(3.0)
    loop = sampled_loop().post(*FORWARD, begin, *again, end, *UPDATE)
    assert loop.said() == PLAIN


def test_two_optimisers_make_one_step() -> None:
    beside = UpdateBegins(THEIRS, "same model"), UpdateEnds(THEIRS, "same model")
    loop = sampled_loop().post(*FORWARD, *passed(2.0), *beside)
    assert loop.step.phase is Phase.UPDATED and not loop.losses
    loop.post(*UPDATE)
    moved = "COPY_WEIGHTS READ_UPDATE COPY_WEIGHTS ADD_RATE READ_UPDATE"
    assert loop.said() == f"OPEN CLOSE READ_GRADIENTS {moved} ARM"
    loop.post(*beside)
    assert loop.said() == "NOTE_LATE_OPTIMIZER", "its gradients were of the last step"
    loop.post(*beside)
    assert "FOLLOW_OPTIMIZER" in loop.done, "twice in a row: it has taken over"


def test_phases_of_several_optimisers_keep_the_loss_of_each() -> None:
    """An optimiser that steps thrice has its last loss; no batch was left out."""
    cleared = BackwardBegins(loss(0.5), lost=True)
    loop = sampled_loop()
    for value in (1.0, 2.0, 3.0):
        begin = replace(cleared, loss=loss(value))
        loop.post(begin, BackwardEnds(loss(value)))
        loop.post(UpdateBegins(THEIRS), UpdateEnds(THEIRS, ends_step=False))
    loop.post(cleared, BackwardEnds(loss(0.5)), *UPDATE)
    assert loop.losses == [3.5] and loop.step.cleared == 0


def test_an_optimiser_inside_backward_ends_the_step_with_its_loss() -> None:
    begin, end = passed(5.0)
    update = UpdateBegins(MINE, late_gradients=True), UpdateEnds(MINE, in_backward=True)
    loop = sampled_loop().post(*FORWARD, begin, *update)
    assert loop.losses == [5.0] and "READ_GRADIENTS" not in loop.said()
    loop.post(ForwardBegins(in_backward=True), end)
    assert loop.said() == "" and loop.step.phase is Phase.ARMED
    assert loop.step.losses.total is None, "the rest of the pass is of no step"
    # A pass that raised leaves no loss.
    loop.post(begin, UpdateBegins(MINE), UpdateEnds(MINE))
    assert loop.losses == [5.0, None]


def test_a_closure_opens_a_pass_inside_the_update() -> None:
    loop = sampled_loop().post(UpdateBegins(MINE, late_gradients=True))
    assert loop.step.phase is Phase.UPDATING and loop.said() == "COPY_WEIGHTS"
    loop.post(ForwardBegins())
    assert loop.step.phase is Phase.OPEN and loop.step.closure
    inside = BackwardBegins(loss(3.0), in_update=True)
    loop.post(inside, BackwardEnds(loss(3.0)))
    for value in (2.0, 1.0):  # LBFGS evaluates often, and clears what it had
        again = replace(inside, loss=loss(value), lost=True)
        loop.post(again, BackwardEnds(loss(value)))
    inner = UpdateBegins(THEIRS, "same parameters", in_update=True)
    loop.post(inner, UpdateEnds(THEIRS, "same parameters"))
    assert not loop.losses, "what runs inside the update takes no step of its own"
    loop.post(UpdateEnds(MINE))
    assert loop.losses == [1.0] and loop.step.cleared == 0
    assert not loop.step.closure


def test_an_update_that_raised_is_not_under_way() -> None:
    loop = sampled_loop().post(UpdateBegins(MINE, late_gradients=True), *FORWARD)
    assert loop.step.updating
    loop.post(*passed(1.0))
    assert not loop.step.updating
    loop.post(UpdateBegins(MINE))
    theirs = UpdateBegins(THEIRS, "same model"), UpdateEnds(THEIRS, "same model")
    loop.post(*theirs)
    assert loop.step.phase is Phase.UPDATED


@pytest.mark.parametrize("counted", ["inner", "outer"])
def test_a_wrapper_and_the_optimiser_inside_it_take_one_step(counted: str) -> None:
    same: Any = {"role": "same parameters"}
    mine, theirs = (MINE, THEIRS) if counted == "inner" else (THEIRS, MINE)
    role = {"inner": ({}, same), "outer": (same, {})}[counted]
    update = (
        UpdateBegins(theirs, **role[1], in_update=False),
        UpdateBegins(mine, **role[0], in_update=counted == "outer"),
        UpdateEnds(mine, **role[0]),
        UpdateEnds(theirs, **role[1]),
    )
    loop = Loop(sampled=False).post(*passed(1.0), *update, *passed(2.0), *update)
    assert loop.losses == [1.0, 2.0] and not loop.step.began


def test_after_an_overflow_the_step_ends_without_an_update() -> None:
    loop = sampled_loop().post(*FORWARD, *passed(1.0, scale=loss(64.0)))
    assert loop.step.scale == 64.0
    loop.post(ScalerUpdated())
    assert loop.said() == "OPEN CLOSE READ_GRADIENTS ARM" and loop.losses == [1.0]
    loop.post(*passed(2.0), *UPDATE, ScalerUpdated())
    assert loop.losses == [1.0, 2.0], "the update has ended it already"
    loop.post(*passed(3.0), ScalerUpdated(skipped=False))
    assert len(loop.losses) == 2, "another optimiser's, of several"


def test_an_evaluation_inside_a_step_measures_nothing() -> None:
    """The window leaves it out, or ends a part that was open; losses are not ours."""
    loop = sampled_loop().post(ForwardBegins(), ForwardEnds(seen=False), *FORWARD)
    assert loop.step.passes == 1
    loop.post(*passed(1.0), *passed(9.0, reached=False), *UPDATE)
    assert loop.said() == f"OPEN CLOSE {PLAIN}" and loop.losses == [1.0]


def test_a_resume_drops_what_was_gathered() -> None:
    loop = sampled_loop().post(*FORWARD, *passed(1.0))
    loop.said()
    loop.post(Begin(40, PassCoverage()))
    assert loop.said() == "DROP ARM" and loop.step.number == 40
    loop.post(*FORWARD, *passed(2.0), *UPDATE)
    assert loop.losses == [2.0] and loop.step.number == 41
    loop.post(ForwardBegins(), Begin(7))
    assert loop.said().endswith("OPEN CLOSE DROP") and loop.step.phase is Phase.IDLE


def test_gradients_of_autograd_grad_are_read_before_they_are_used() -> None:
    for use in (Clipped(), UpdateBegins(MINE)):
        loop = sampled_loop().post(*FORWARD, use)
        assert "READ_GRADIENTS" in loop.said()
        loop.post(*UPDATE)
        assert loop.losses == [None]
        assert "READ_GRADIENTS" not in loop.said(), "once"


def test_gradients_that_the_loop_replaced_are_read_again() -> None:
    loop = sampled_loop().post(*FORWARD, *passed(1.0))
    loop.said()
    loop.post(UpdateBegins(MINE, gradients=Gradients(replaced=True)))
    assert loop.said() == "READ_GRADIENTS COPY_WEIGHTS"
    assert loop.step.losses.partial == "replaced"


def test_a_batch_that_is_left_out_leaves_no_loss() -> None:
    loop = sampled_loop().post(*FORWARD, *passed(9.0))
    loop.post(BackwardBegins(loss(1.0), lost=True), BackwardEnds(loss(1.0)), *UPDATE)
    assert loop.losses == [1.0] and loop.step.cleared == 1
    theirs = UpdateBegins(THEIRS, "same model"), UpdateEnds(THEIRS, "same model")
    loop.post(*passed(1.0), *theirs, BackwardBegins(loss(1.0), lost=True))
    assert "NOTE_OTHER_BATCHES" in loop.done


def test_a_model_that_no_pass_reaches_has_the_losses_there_are() -> None:
    loop = sampled_loop().post(*passed(1.0, reached=False), *passed(2.0, reached=False))
    loop.post(*UPDATE)
    assert loop.losses == [3.0], "no marked parameter is used: all count"
    loop.post(*passed(4.0), *passed(8.0, reached=False), *UPDATE)
    assert loop.losses == [3.0, 4.0], "it has its own now"


def test_a_loss_that_is_no_scalar_is_not_all() -> None:
    loop = sampled_loop().post(BackwardBegins(), BackwardEnds())
    assert loop.step.losses.partial == "no scalar"
    loop.post(*UPDATE)
    assert not loop.step.losses.partial


def test_weights_that_move_outside_any_step_are_noted_until_one_is_seen() -> None:
    loop = sampled_loop().post(BackwardBegins(moved=True))
    assert "NOTE_MOVED" in loop.said()
    loop.post(*UPDATE, BackwardBegins(moved=True))
    assert "NOTE_MOVED" not in loop.said()


def test_a_stored_batch_is_run_again_once() -> None:
    loop = Loop(source="replay").post(ForwardBegins(), ForwardEnds())
    loop.post(*passed(1.0), *passed(1.0), *UPDATE)
    once = "ARM READ_GRADIENTS REPLAY READ_GRADIENTS COPY_WEIGHTS ADD_RATE READ_UPDATE"
    assert loop.said() == f"{once} ARM"
    loop.post(ForwardEnds(), StepCalled())
    assert loop.said() == "REPLAY ARM", "no backward pass: when the step ends"
    loop.post(StepCalled())
    assert loop.said() == "ARM", "nothing was stored"


def test_a_loss_that_is_given_stands_for_those_that_were_seen() -> None:
    loop = sampled_loop().post(*passed(1.0), StepCalled(loss_given=True))
    loop.post(*passed(2.0), StepCalled())
    assert loop.losses == [None, 2.0]


def test_the_norm_of_what_is_clipped_twice_is_the_last() -> None:
    head, body = frozenset({1, 2}), frozenset({3})
    loop = sampled_loop().post(
        Clipped(loss(1.0), body), Clipped(loss(2.0), head), Clipped(loss(3.0), head)
    )
    assert loop.step.norms == ((body, 1.0), (head, 3.0))
    loop.post(Clipped(loss(9.0)), *UPDATE)
    assert loop.step.norms == ()


LIKELY = [*EVENTS.values(), ForwardBegins(), ForwardEnds(), *passed(1.0), *UPDATE]
UNLIKELY = (Begin, Failed, Closed)
streams = st.lists(
    st.one_of(
        st.sampled_from([e for e in LIKELY if not isinstance(e, UNLIKELY)]),
        st.sampled_from(LIKELY),
    ),
    max_size=60,
)


@given(
    streams, st.lists(st.booleans(), min_size=1), st.sampled_from(["hooks", "replay"])
)
def test_effects_stay_balanced_whatever_the_loop_does(
    events: list[Event], sampled: list[bool], source: Any
) -> None:
    """What is opened is closed, once; off-sample nothing is measured."""
    step, opened, armed, replays = Step(), 0, 0, 0
    waiting: list[Event] = [*reversed(events), Begin(0)]
    waiting.insert(0, Closed())
    ends = 0
    while waiting:
        event = waiting.pop()
        if isinstance(event, Begin):
            coverage = PassCoverage() if sampled[ends % len(sampled)] else None
            event = replace(event, coverage=coverage, source=source)
        before = step
        step, effects = transition(before, event)
        assert before.live or not set(effects) - {Effect.LEAVE}
        users = [effect in USERS_CODE for effect in effects]
        assert users == sorted(users), "the user is called last"
        measured = before.sampled or (isinstance(event, Begin) and step.sampled)
        assert measured or not MEASURING & {*effects}
        assert effects.count(Effect.FINISH) == effects.count(Effect.ADVANCE)
        assert (step.phase is Phase.ENDED) == (
            Effect.ADVANCE in effects or before.phase is Phase.ENDED
        ) or step.phase in (*OVER, Phase.IDLE, Phase.ARMED)
        for effect in effects:
            opened += (effect is Effect.OPEN) - (effect is Effect.CLOSE)
            assert opened in (0, 1)
            if effect is Effect.ARM:
                assert armed == 0, "what was armed before is finished, or dropped"
                armed, replays = 1, 0
            if effect in (Effect.FINISH, Effect.DROP):
                assert effect is Effect.FINISH or before.sampled
                armed = 0
            replays += effect is Effect.REPLAY
            assert replays <= 1 and (source == "replay" or not replays)
            if effect is Effect.ADVANCE:
                waiting.append(Begin(step.number + 1))
                ends += 1
        assert opened == (step.phase is Phase.OPEN)
        assert len(step.began) <= 2, "optimisers, not updates, are remembered"
        assert step.live or step.losses.total is None, "no tensor is kept"
    assert opened == armed == 0 and step.phase is Phase.CLOSED


@pytest.mark.parametrize("last", [Failed(), Closed()])
def test_who_leaves_keeps_no_tensor_of_the_loop(last: Event) -> None:
    loop = sampled_loop().post(*passed(1.0, scale=loss(2.0)))
    loop.post(Clipped(loss(1.0), frozenset({1})), last)
    assert loop.step.losses.total is None and loop.step.scale is None
    assert not loop.step.norms and not loop.step.live
