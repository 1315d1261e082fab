"""Joins the autopilot to a watched run: what it sees, how ranks agree, its records.

Nothing here runs off-sample but one comparison before each update, unless a snapshot
is due or something was decided.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.autopilot.options import Given, read_autopilot
from equipoise.autopilot.recording import remedies_noted
from equipoise.watching.ranks.merge import RankSample
from equipoise.watching.step.batch import Batch
from equipoise.watching.step.measure import Sampler
from equipoise.watching.step.pipeline import Recorder

if TYPE_CHECKING:
    from equipoise.autopilot.pilot import Pilot
    from equipoise.autopilot.trial import Loss


class AutopilotBridge:
    """What changes a watched model: its autopilot, and remedies the user applies."""

    def __init__(
        self,
        recorder: Recorder,
        sampler: Sampler,
        autopilot: Given,
        *,
        stored: Callable[[], Batch | None],
        folder: Path,
    ) -> None:
        self._recorder, self._sampler = recorder, sampler
        self._model, self._ranks = sampler.anatomy.model, recorder.ranks.count
        options = read_autopilot(autopilot)
        self.pilot: Pilot | None = None
        if options is not None:
            # Here: it loads every remedy, which a run without it does not need.
            from equipoise.autopilot import pilot

            self.pilot = pilot.Pilot(
                options,
                self._model,
                agree=self._agree,
                first_rank=recorder.ranks.rank == 0,
                stored_loss=lambda: _loss_of(stored()),
                folder=folder,
            )

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record every remedy that is applied or undone during the block."""
        recorder = self._recorder
        step = partial(getattr, recorder.schedule, "step")
        with remedies_noted(self._model, recorder.note_remedy, step):
            yield

    def before_update(self, optimizer: Optimizer) -> None:
        if self.pilot is not None:
            self.pilot.before_update(self._recorder.schedule.step, optimizer)

    def consider(self, optimizer: Optimizer | None) -> None:
        """Decide after a sampled step, on every rank or on none."""
        if self.pilot is None or optimizer is None:
            return
        if self._recorder.ranks.count < self._ranks:
            step = self._recorder.schedule.step
            self.pilot.stop(step, "the other ranks no longer take part")
        self.pilot.consider(self._recorder.judge, optimizer)
        self._report()

    def act(self, optimizer: Optimizer) -> None:
        """Carry out what was decided, after the optimiser's step has ended."""
        if self.pilot is not None:
            self.pilot.act(optimizer)
            self._report()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pilot is None else {"autopilot": self.pilot.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer: Optimizer | None
    ) -> None:
        given = state.get("autopilot")
        if self.pilot is not None and given is not None and optimizer is not None:
            self.pilot.load_state_dict(given, optimizer)

    def _report(self) -> None:
        if self.pilot is not None:
            self._recorder.add_findings(self.pilot.pop_findings())

    def _agree(self, text: str) -> Sequence[str] | None:
        """Exchange a text with all ranks, which all get here at the same step."""
        step = self._recorder.schedule.step
        try:
            messages = self._recorder.ranks.exchange(RankSample(decision=text))
        except RuntimeError as error:
            lost = self._recorder.not_exchanged(step, error)
            self._recorder.leave_group(lost, self._sampler)
            return None
        return [message.decision for message in messages] or None


def _loss_of(batch: Batch | None) -> "Loss | None":
    """Return the loss of a stored batch, where the model itself returns its loss."""
    if batch is None or "labels" not in batch.kwargs:
        return None

    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(*batch.args, **batch.kwargs).loss
        return found

    return loss
