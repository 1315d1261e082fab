"""One step's life in one table: ``transition(step, event) -> (step, effects)``.

``Step`` is all that is remembered of the step under way. The function is pure: it sees
no model, reads no clock and writes nothing. What it decides is a list of effects, which
one function carries out in their order (:meth:`equipoise.watching.handle.Watch._take`).

======================  ===========================================================
the loop                the row that covers it
======================  ===========================================================
micro-batches 2 … k     a module that was measured opens nothing; ``BackwardEnds`` adds
                        its loss, and gradients are read again, complete by then
several forwards        each part opens once; one backward pass ends them all
loss after the model    ``ForwardEnds`` waits in FORWARD_DONE for ``BackwardBegins``
recomputation           a forward inside a backward pass opens nothing
two optimisers          one of the same model: UPDATED; the step goes on
inside backward         the step ends with the loss of the pass under way, and what is
                        left of that pass belongs to no step
closure                 ``closure`` remembers the update while passes run inside it
scaler overflow         ``ScalerUpdated`` ends a step whose update was left out
evaluation              measures nothing: the window opens for passes that train
resume                  ``Begin`` in mid-step: what was gathered is dropped
autograd.grad           no backward pass: the update reads the gradients it will use
failure, close          DETACHED, CLOSED: everything open is closed, once
======================  ===========================================================
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.probes.capture import PassCoverage


class Phase(Enum):
    """Where a step stands."""

    IDLE = auto()
    """Not measured: it passes through the phases below, and nothing is opened."""
    ARMED = auto()
    """Measured: waiting for the first call of the model, or of a part of it."""
    OPEN = auto()
    """A forward pass runs with the probes attached."""
    FORWARD_DONE = auto()
    """No forward pass is measured now; a backward pass may be under way."""
    BACKWARD_DONE = auto()
    """The model has gradients; more may be added."""
    UPDATING = auto()
    """An optimiser whose steps count is moving the weights."""
    UPDATED = auto()
    """Some of the weights have moved, and the step is not over."""
    ENDED = auto()
    """It is being recorded; ``Begin`` follows."""
    DETACHED = auto()
    """Something of ours failed: the training goes on without us."""
    CLOSED = auto()


class Effect(Enum):
    """What is done because of an event: a closed list."""

    ARM = auto()
    STORE_BATCH = auto()
    OPEN = auto()
    CLOSE = auto()
    REPLAY = auto()
    CHECK_LOSS = auto()
    SEEK_COMPILED = auto()
    READ_GRAPH = auto()
    CHECK_NORM = auto()
    READ_GRADIENTS = auto()
    SNAPSHOT = auto()
    COPY_WEIGHTS = auto()
    READ_UPDATE = auto()
    ADD_RATE = auto()
    FOLLOW_OPTIMIZER = auto()
    ADD_LOSS = auto()
    FINISH = auto()
    CHECK_COVERAGE = auto()
    WRITE = auto()
    ADVANCE = auto()
    ACT = auto()
    DROP = auto()
    LEAVE_LOOP = auto()
    LEAVE = auto()
    WRITE_REST = auto()
    NOTE_MOVED = auto()
    NOTE_OTHER_BATCHES = auto()
    NOTE_LATE_OPTIMIZER = auto()
    NOTE_NO_STEP = auto()
    NOTE_FAILURE = auto()
    REPORT = auto()
    CALL_BACK = auto()
    SUMMARISE = auto()


MEASURING = frozenset(
    {
        Effect.ARM,
        Effect.OPEN,
        Effect.REPLAY,
        Effect.READ_GRAPH,
        Effect.READ_GRADIENTS,
        Effect.COPY_WEIGHTS,
        Effect.READ_UPDATE,
    }
)
"""What only a sampled step does."""
USERS_CODE = frozenset({Effect.REPORT, Effect.CALL_BACK})
"""What calls the user back: last, so that an exception of theirs leaves nothing of ours
undone, and outside the boundary, so that it reaches them."""

Source = Literal["hooks", "replay", "replayed"]
"""How a step is measured: by hooks, or by running the stored micro-batch again."""
Role = Literal["counted", "same parameters", "same model", "another model"]
"""How an optimiser relates to those whose steps count."""


Partial = Literal["", "no scalar", "replaced"]
"""Why the losses that were seen may not be all of the objective."""


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a step: sums, so that one tensor is held and not many.

    A backward pass that reached no parameter of the model is another model's: its loss
    counts only where no pass reached this one, all of whose parameters may be unused.
    """

    own: "Tensor | None" = None
    others: "Tensor | None" = None
    running: "Tensor | None" = None
    """The loss whose backward pass is under way."""
    used: tuple[tuple[int, "Tensor"], ...] = ()
    """Id of an optimiser, and the loss whose gradients it used last: of one that steps
    often in a step the last loss counts, as their sum would jump with their number."""
    partial: Partial = ""

    def plus(self, loss: "Tensor | None", *, own: bool) -> "Losses":
        """Return these with the loss of a backward pass that has ended."""
        if loss is None:
            partial: Partial = "no scalar" if own else self.partial
            return replace(self, running=None, partial=partial)
        if own:
            return replace(self, running=None, own=_added(self.own, loss))
        return replace(self, running=None, others=_added(self.others, loss))

    def used_by(self, optimizer: int) -> "Losses":
        """Return these once an optimiser has used the gradients so far."""
        part = self.others if self.own is None else self.own
        used = tuple(one for one in self.used if one[0] != optimizer)
        if part is not None:
            used = (*used, (optimizer, part))
        return replace(self, own=None, others=None, used=used)

    def ended(self, *, in_backward: bool) -> "Losses":
        """Return these at the end; inside a backward pass its loss counts too."""
        nothing = self.own is None and self.others is None
        running = self.running if in_backward and nothing and not self.used else None
        return replace(self, others=running if nothing else self.others, running=None)

    @property
    def total(self) -> "Tensor | None":
        total = self.others if self.own is None else self.own
        for _, part in self.used:
            total = _added(total, part)
        return total


def _added(total: "Tensor | None", loss: "Tensor") -> "Tensor":
    return loss if total is None else total + loss.to(total.device)


@dataclass(frozen=True, slots=True)
class Step:
    """The step under way: all that is remembered of it."""

    number: int = 0
    phase: Phase = Phase.ENDED
    coverage: "PassCoverage | None" = None
    """What its passes showed, if it is sampled."""
    source: Source = "hooks"
    passes: int = 0
    """Forward passes that were measured, or stored to be run again."""
    losses: Losses = Losses()
    norms: tuple[tuple[frozenset[int], "Tensor"], ...] = ()
    """Ids of parameters that were clipped together, and their norm."""
    scale: "Tensor | None" = None
    """The factor of a gradient scaler in its last backward pass."""
    reached: Literal["never", "not yet", "yes"] = "never"
    """Whether a backward pass of this step, or of any, reached the model."""
    gradients: Literal["unread", "absent", "read"] = "unread"
    closure: bool = False
    """Whether passes run inside the update that is under way."""
    updates: int = 0
    """Updates of the weights that were seen in it."""
    stepped: tuple[int, ...] = ()
    """Ids of the optimisers that count and have stepped in it, in their order."""
    other: int = 0
    """Id of an optimiser that stepped since the last one that counts."""
    began: tuple[tuple[int, int], ...] = ()
    """Ids of optimisers whose updates are under way, and in which step each began."""
    ended: int = 0
    """Steps that were seen to end before this one."""
    cleared: int = 0
    """Batches whose gradients were cleared without a step, so far."""

    @property
    def sampled(self) -> bool:
        return self.coverage is not None

    @property
    def live(self) -> bool:
        """Whether the loop is followed."""
        return self.phase not in OVER

    @property
    def updating(self) -> bool:
        """Whether an update that counts has begun, and was not seen to end."""
        return self.phase is Phase.UPDATING or self.closure

    @property
    def over_for_others(self) -> bool:
        """Whether the gradients of this step are still to come."""
        return self.reached == "not yet"


OVER = frozenset({Phase.DETACHED, Phase.CLOSED})
ASLEEP = OVER | {Phase.ENDED}
"""Phases in which the loop's events mean nothing."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The next step, or after a resume the one under way under another number."""

    number: int
    coverage: "PassCoverage | None" = None
    source: Source = "hooks"


@dataclass(frozen=True, slots=True)
class ForwardBegins:
    """The model, or a part of it, is called for the first time in a sampled step."""

    in_backward: bool = False


@dataclass(frozen=True, slots=True)
class ForwardEnds:
    """That call is over, or what it was measured for has come to its end."""

    seen: bool = True
    """Whether there were numbers to read: inside torch.func there are none."""


@dataclass(frozen=True, slots=True)
class BackwardBegins:
    loss: "Tensor | None" = None
    roots: tuple["Tensor", ...] = ()
    lost: bool = False
    """Whether gradients were cleared since the last pass."""
    moved: bool = False
    """Whether weights moved since the last pass."""
    in_update: bool = False
    """Whether an optimiser that counts is stepping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What can be seen of gradients now; looked at only in a sampled step."""

    present: bool = True
    replaced: bool = False
    """Whether the loop set others since the last backward pass."""


@dataclass(frozen=True, slots=True)
class BackwardEnds:
    loss: "Tensor | None" = None
    scale: "Tensor | None" = None
    reached: bool = True
    """Whether it reached the model: a teacher's or a critic's does not."""
    gradients: Gradients = Gradients()


@dataclass(frozen=True, slots=True)
class Clipped:
    norm: "Tensor | None" = None
    parameters: frozenset[int] | None = None
    """Ids of what was clipped, unless looking would use it up."""
    gradients: Gradients = Gradients()


@dataclass(frozen=True, slots=True)
class ScalerUpdated:
    skipped: bool = True
    """Whether it left out the update that would have ended the step."""


@dataclass(frozen=True, slots=True)
class UpdateBegins:
    optimizer: Any = None
    role: Role = "counted"
    in_update: bool = False
    late_gradients: bool = False
    """Whether they are still to come: in its closure, or in the pass under way."""
    gradients: Gradients = Gradients()


@dataclass(frozen=True, slots=True)
class UpdateEnds:
    optimizer: Any = None
    role: Role = "counted"
    ends_step: bool = True
    """Whether the training step is over, of which several optimisers may be part."""
    in_backward: bool = False


@dataclass(frozen=True, slots=True)
class StepCalled:
    """The user's ``.step()``, which ends a step where no optimiser was given."""

    loss_given: bool = False
    in_backward: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine's own exception; a probe's removes that probe only."""

    number: int = 0
    """The step in which it was raised."""


@dataclass(frozen=True, slots=True)
class Closed:
    orderly: bool = True
    """Whether the other ranks close now as well."""


Event = (
    Begin
    | ForwardBegins
    | ForwardEnds
    | BackwardBegins
    | BackwardEnds
    | Clipped
    | ScalerUpdated
    | UpdateBegins
    | UpdateEnds
    | StepCalled
    | Failed
    | Closed
)
Outcome = tuple[Step, tuple[Effect, ...]]


def transition(step: Step, event: Event) -> Outcome:
    """Return the step after the event, and what is to be done, in that order."""
    if step.phase in ASLEEP and not isinstance(event, Begin | Failed | Closed):
        return _after_end(step, event)
    return _ROWS[type(event)](step, event)


def _after_end(step: Step, event: Event) -> Outcome:
    """Keep the books of optimisers only: a wrapper ends after the one inside it."""
    if isinstance(event, UpdateEnds):
        return replace(step, began=_without(step, id(event.optimizer))), ()
    return step, ()


def _begin(step: Step, event: Begin) -> Outcome:
    if not step.live:
        return step, ()
    new = Step(
        number=event.number,
        phase=Phase.IDLE if event.coverage is None else Phase.ARMED,
        coverage=event.coverage,
        source=event.source,
        reached="never" if step.reached == "never" else "not yet",
        began=step.began,
        ended=step.ended,
        other=step.other,
        cleared=step.cleared,
    )
    dropped = _dropped(step) if step.phase is not Phase.ENDED else ()
    arm = (Effect.ARM,) if new.sampled else ()
    return new, (*dropped, *arm, Effect.STORE_BATCH)


def _dropped(step: Step) -> tuple[Effect, ...]:
    """Return the effects that take an unrecorded sample off the model."""
    return (*_closing(step), *((Effect.DROP,) if step.sampled else ()))


def _closing(step: Step) -> tuple[Effect, ...]:
    return (Effect.CLOSE,) if step.phase is Phase.OPEN else ()


def _shut(step: Step) -> tuple[tuple[Effect, ...], Step]:
    """Close a pass that is still open, as parts of a model leave it: it was seen."""
    return _closing(step), replace(step, passes=step.passes + len(_closing(step)))


def _reported(notes: tuple[Effect, ...]) -> tuple[Effect, ...]:
    return (*notes, Effect.REPORT) if notes else ()


def _forward_begins(step: Step, event: ForwardBegins) -> Outcome:
    hooked = step.sampled and step.source == "hooks"
    if not hooked or step.phase is Phase.OPEN or event.in_backward:
        return step, ()
    return replace(step, phase=Phase.OPEN, closure=step.updating), (Effect.OPEN,)


def _forward_ends(step: Step, event: ForwardEnds) -> Outcome:
    waiting = step.phase is Phase.ARMED and step.source == "replay" and event.seen
    done = waiting or step.phase is Phase.OPEN
    new = replace(step, passes=step.passes + (event.seen and step.sampled))
    return replace(new, phase=Phase.FORWARD_DONE) if done else new, _closing(step)


def _backward_begins(step: Step, event: BackwardBegins) -> Outcome:
    reached = step.reached == "yes"
    # What is cleared in a closure, or between phases, has been used.
    left_out = event.lost and reached and not (event.in_update or step.stepped)
    losses = Losses(used=step.losses.used) if event.lost else step.losses
    closing, step = _shut(step)
    new = replace(
        step,
        phase=Phase.FORWARD_DONE,
        closure=event.in_update,
        losses=replace(losses, running=event.loss),
        reached="not yet" if event.lost and reached else step.reached,
        cleared=step.cleared + left_out,
    )
    unseen = step.sampled and not step.passes
    outside = event.moved and not event.in_update and not step.ended
    notes = (
        *((Effect.NOTE_MOVED,) if outside else ()),
        *((Effect.NOTE_OTHER_BATCHES,) if left_out and step.other else ()),
    )
    seek = (Effect.SEEK_COMPILED,) if unseen else ()
    graph = (Effect.READ_GRAPH,) if step.sampled else ()
    return new, (*closing, Effect.CHECK_LOSS, *graph, *seek, *_reported(notes))


def _backward_ends(step: Step, event: BackwardEnds) -> Outcome:
    if step.phase in (Phase.IDLE, Phase.ARMED):  # of a pass in which the last one ended
        found = "not yet" if event.reached and step.reached == "never" else step.reached
        return replace(step, reached=found), ()
    losses = step.losses.plus(event.loss, own=event.reached)
    new = replace(step, losses=losses, scale=event.scale)
    if not event.reached and step.reached != "never":
        return new, ()
    closing, new = _shut(new)
    reached: Any = "yes" if event.reached else "never"
    new = replace(new, phase=Phase.BACKWARD_DONE, reached=reached)
    read, effects = _reading(new, event.gradients)
    return read, (*closing, *effects)


def _reading(step: Step, gradients: Gradients) -> Outcome:
    """Read gradients while they are complete, and what compiled code hid."""
    if not step.sampled:
        return step, ()
    present = gradients.present or step.gradients == "read"
    new = replace(step, gradients="read" if present else "absent")
    new, replay = _replaying(new)
    return new, (Effect.READ_GRADIENTS, *replay)


def _replaying(step: Step) -> Outcome:
    """Run the stored micro-batch again, once."""
    if step.source != "replay" or not step.passes:
        return step, ()
    return replace(step, source="replayed"), (Effect.REPLAY,)


def _reading_missed(step: Step, gradients: Gradients) -> Outcome:
    """Read the gradients that will be used, if no backward pass showed them."""
    if gradients.replaced:
        step = replace(step, losses=replace(step.losses, partial="replaced"))
    if gradients.replaced or step.gradients == "unread":
        return _reading(step, gradients)
    return step, ()


def _clipped(step: Step, event: Clipped) -> Outcome:
    ids, norms = event.parameters, step.norms
    if ids is not None and event.norm is not None:  # clipped again, the last counts
        norms = tuple(one for one in norms if one[0].isdisjoint(ids))
        norms = (*norms, (ids, event.norm))
    new, effects = _reading_missed(replace(step, norms=norms), event.gradients)
    return new, (Effect.CHECK_NORM, *effects)


def _scaler_updated(step: Step, event: ScalerUpdated) -> Outcome:
    used = step.reached == "yes" or step.stepped
    return _ended(step) if event.skipped and used else (step, ())


def _update_begins(step: Step, event: UpdateBegins) -> Outcome:
    mine = id(event.optimizer)
    step = replace(step, began=(*_without(step, mine), (mine, step.number)))
    if step.updating and not event.in_update:  # a step that raised left it behind
        step = replace(step, closure=False)
    copies = (Effect.COPY_WEIGHTS,) if step.sampled else ()
    if event.role == "counted":
        read: tuple[Effect, ...] = ()
        if not event.late_gradients:
            step, read = _reading_missed(step, event.gradients)
        closing, step = _shut(step)
        new = replace(step, phase=Phase.UPDATING)
        return new, (*closing, *read, *copies, Effect.SNAPSHOT)
    if step.phase is Phase.UPDATING and not event.in_update:
        step = replace(step, phase=Phase.BACKWARD_DONE)
    idle = event.role == "another model" or step.over_for_others
    return step, () if idle else copies


def _update_ends(step: Step, event: UpdateEnds) -> Outcome:
    mine = id(event.optimizer)
    # One whose update held the end of a step is a wrapper, as Lookahead's.
    wrapper = dict(step.began).get(mine, step.number) != step.number
    step = replace(step, began=_without(step, mine))
    if event.role == "counted":
        return _counted(step, event)
    # It and the optimiser inside it, or around it, take one step together.
    if step.updating or wrapper or event.role == "another model":
        return step, ()
    again, step = step.other == mine, replace(step, other=mine)
    if event.role == "same parameters" or again:
        new, effects = _counted(step, event)
        said = effects if Effect.REPORT in effects else _reported(effects)
        return new, (Effect.FOLLOW_OPTIMIZER, *said)
    if step.over_for_others:
        return step, _reported((Effect.NOTE_LATE_OPTIMIZER,))
    return _updated(step)


def _counted(step: Step, event: UpdateEnds) -> Outcome:
    """Count the update; the step ends with it, or goes on to another optimiser's."""
    mine = id(event.optimizer)
    losses, stepped = step.losses.used_by(mine), (*step.stepped, mine)
    new = replace(step, closure=False, other=0, losses=losses, stepped=stepped)
    new, effects = _updated(new)
    if event.ends_step:
        new, end = _ended(new, in_backward=event.in_backward)
        effects = (*effects, *end)
    return new, _before_users((Effect.ADD_RATE, *effects), Effect.ACT)


def _updated(step: Step) -> Outcome:
    closing, step = _shut(step)
    read = (Effect.READ_UPDATE,) if step.sampled else ()
    new = replace(step, phase=Phase.UPDATED, updates=step.updates + 1)
    return new, (*closing, *read)


def _step_called(step: Step, event: StepCalled) -> Outcome:
    losses = Losses() if event.loss_given else step.losses
    new = replace(step, losses=losses)
    return _ended(new, in_backward=event.in_backward and not event.loss_given)


def _ended(step: Step, *, in_backward: bool = False) -> Outcome:
    """End the step; inside a backward pass its loss is the one of that pass."""
    losses = step.losses.ended(in_backward=in_backward)
    closing, new = _shut(step)
    new, replay = _replaying(replace(new, losses=losses))
    new = replace(new, phase=Phase.ENDED, ended=step.ended + 1)
    return new, (*closing, *replay, *END)


END = (
    Effect.ADD_LOSS,
    Effect.FINISH,
    Effect.CHECK_COVERAGE,
    Effect.WRITE,
    Effect.ADVANCE,
    Effect.REPORT,
    Effect.CALL_BACK,
)
"""How every step ends. Coverage is complete once the sample is finished, and what it
lacks is written with it; the schedule advances before users are called, so that what
they save resumes at the next step."""


def _before_users(effects: tuple[Effect, ...], effect: Effect) -> tuple[Effect, ...]:
    """Return the effects with one more as the last that is ours."""
    ours = tuple(e for e in effects if e not in USERS_CODE)
    return (*ours, effect, *effects[len(ours) :])


def _failed(step: Step, event: Failed) -> Outcome:
    if not step.live:
        return step, ()
    leave = (Effect.LEAVE_LOOP, Effect.NOTE_FAILURE, Effect.WRITE_REST, Effect.REPORT)
    return _left(step, Phase.DETACHED), (*_dropped(step), *leave)


def _closed(step: Step, event: Closed) -> Outcome:
    closed = _left(step, Phase.CLOSED)
    if step.phase is Phase.CLOSED:
        return step, ()
    if step.phase is Phase.DETACHED:
        return closed, (Effect.LEAVE,)
    rest = (Effect.LEAVE, Effect.NOTE_NO_STEP, Effect.WRITE_REST, Effect.SUMMARISE)
    return closed, (*_dropped(step), *rest, Effect.REPORT)


def _left(step: Step, phase: Phase) -> Step:
    """Return the step without any tensor of the loop's."""
    return replace(step, phase=phase, losses=Losses(), norms=(), scale=None)


def _without(step: Step, optimizer: int) -> tuple[tuple[int, int], ...]:
    return tuple(one for one in step.began if one[0] != optimizer)


_ROWS: dict[type, Callable[[Step, Any], Outcome]] = {
    Begin: _begin,
    ForwardBegins: _forward_begins,
    ForwardEnds: _forward_ends,
    BackwardBegins: _backward_begins,
    BackwardEnds: _backward_ends,
    Clipped: _clipped,
    ScalerUpdated: _scaler_updated,
    UpdateBegins: _update_begins,
    UpdateEnds: _update_ends,
    StepCalled: _step_called,
    Failed: _failed,
    Closed: _closed,
}
