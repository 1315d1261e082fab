"""The handle a watched model is held by: counts steps, samples some, writes all."""

import atexit
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import Boundary, Heard, Probe
from equipoise.probes.sharding import copies, is_partial
from equipoise.records import Finding
from equipoise.watching import loop_hooks as tracing
from equipoise.watching import reporting as announce
from equipoise.watching.batch import Holder
from equipoise.watching.coverage import DEAF, Silence, deafness
from equipoise.watching.loop_hooks import Losses, tapped
from equipoise.watching.nonfinite import Alarm
from equipoise.watching.options import WatchOptions
from equipoise.watching.ranks import Ranks
from equipoise.watching.recorder import Account, Ledger
from equipoise.watching.reporting import Voice
from equipoise.watching.sampler import Sampler
from equipoise.watching.schedule import Meter, Schedule
from equipoise.watching.step_readings import NORM, NORM_PART

log = logging.getLogger("equipoise")

DEAF_AFTER = 4


class Watch:
    """Watches one model until closed; also a context manager.

    A step ends at ``optimizer.step()`` when an optimiser was given, and at ``.step()``
    otherwise. Hooks exist only while a sampled step waits for its forward pass and
    during it; off-sample the model runs exactly as if nobody watched.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        probes: Sequence[Probe],
        ledger: Ledger,
        *,
        path: Path,
        optimizer: Optimizer | None,
        options: WatchOptions,
        ranks: Ranks,
        step: int = 0,
    ) -> None:
        self.anatomy, self.options, self.path = anatomy, options, path
        self.closed = False
        self.optimizer, self.speaks = optimizer, ranks.rank == 0
        self._schedule = Schedule(
            every=options.every, at=options.at, budget=options.budget, step=step
        )
        self._meter = Meter()
        self._boundary = Boundary(strict=options.strict, around=self._meter.running)
        self._sampler = Sampler(
            anatomy,
            probes,
            boundary=self._boundary,
            only_training=optimizer is not None,
        )
        self._losses = Losses(anatomy.model)
        self._alarm = Alarm(anatomy.model, rank=ranks.rank, keep=path)
        self._silence = Silence(anatomy)
        self.voice = Voice(options.on_finding, speaks=ranks.rank == 0)
        self._account = Account(ledger, ranks, self._schedule, self._sampler)
        self._step_ended: list[Callable[[int, bool], Any]] = []
        self._scaled = self._ever_stepped = self._refused = False
        self._number = id(self)
        tracing.listens(self, self._number)
        self._off = ExitStack()
        """Takes off what may be taken off at any moment."""
        self._holding, self._stack = ExitStack(), ExitStack()
        self._attach()
        self._guarded(self._sampler.begin)(ranks)
        self._arm()

    @property
    def current_step(self) -> int:
        """The step under way, counted from 0 over the whole run."""
        return self._schedule.step

    @property
    def sampling(self) -> bool:
        """Whether the step under way is one that is measured."""
        return self._sampler.armed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found so far."""
        return tuple(self.voice.said)

    def on_step_end(self, callback: Callable[[int, bool], Any]) -> None:
        """Have ``callback(step, sampled)`` called whenever a step has ended."""
        self._step_ended.append(callback)

    def step(self, *, loss: Tensor | float | None = None, **scalars: float) -> None:
        """Add scalars to the current step; without an optimiser, also end the step."""
        named = scalars if loss is None else {"loss": loss, **scalars}
        # With an optimiser, its hook has already ended the step these belong to.
        late = self.optimizer is not None and self._schedule.step > 0
        for name, value in named.items():
            self._account.light.add(self._schedule.step - late, name, value)
        if self.optimizer is None:
            self._end_step(loss_given=loss is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry for sampling to go on in phase.

        Scalars not yet in the run file are part of it: each rank keeps its own state.
        """
        return {**self._schedule.state_dict(), "pending": self._account.pending()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stood: the same step number, the same phase."""
        self._sampler.close()
        self._schedule.load_state_dict(state)
        self._account.restore(state.get("pending", ()))
        self._arm()

    def close(self, *, orderly: bool = True) -> None:
        """Take every hook and patch off, and leave one finished file."""
        if self.closed:
            return
        self.closed = True
        self._stack.close()
        self._account.note([*self._alarm.taken(), *self._deafness()])
        self._guarded(self._finish)(orderly)
        announce.closing(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whoever raises may be the only rank that does: wait for nobody.
        self.close(orderly=error is None)

    # What the taps tell, in the order of a training step.

    def before_backward(self, loss: Tensor, root: Tensor) -> None:
        with self._meter.running():
            self._losses.before_backward()
            self._guarded(self._alarm.loss)(self._schedule.step, loss, root)
        if self._sampler.passed_by():
            self._silence.certain = True
            self._check_silence(self._schedule.step, self._sampler.heard, True)
        if self._losses.fresh_starts >= DEAF_AFTER and not self._ever_stepped:
            self.close(orderly=False)
            raise SilentSiteError(DEAF)

    def after_backward(self, loss: Tensor, scale: Tensor | None) -> None:
        self._scaled = scale is not None
        if self._losses.after_backward(loss) or not self._losses.ever_ours:
            self._guarded(self._sampler.after_backward)(scale)

    def before_clipping(self, norm: Tensor) -> None:
        with self._meter.running():
            step = self._schedule.step
            name = NORM_PART if is_partial(norm) else NORM
            held = copies(norm, self._account.ranks.count) if name == NORM_PART else 1
            norm = local_part(norm)
            self._account.light.add(step, name, norm * held**-0.5)
            self._guarded(self._alarm.norm)(step, norm, scaled=self._scaled)

    def after_scaler_update(self) -> None:
        """After an overflow a scaler leaves the optimiser out: the step is over."""
        if self.optimizer is not None and self._losses.ours:
            self._end_step()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            tracing.tell(self._number)
            return
        if self.closed:
            return
        rate = optimizer.param_groups[0]["lr"]
        rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        self._account.light.add(self._schedule.step, "learning_rate", rate)
        self._guarded(self._sampler.after_update)(optimizer)
        self._end_step()

    def traced(self) -> None:
        """Say at once that the step which is being compiled will not be seen."""
        if not self._refused and not self.closed:
            self._refused = True
            self._account.note(self.voice.say([deafness(self._schedule.step)]))

    def _attach(self) -> None:
        self._off.enter_context(tapped(self))
        self._off.callback(self._sampler.close)
        self._off.callback(self._holding.close)
        self._stack.callback(self._off.close)
        if self.optimizer is not None:
            hook = self.optimizer.register_step_post_hook(self._after_optimizer)
            self._stack.callback(hook.remove)
        close = partial(_close, weakref.ref(self))
        atexit.register(close)
        self._stack.callback(atexit.unregister, close)

    def _arm(self) -> None:
        if self._schedule.due and not self.closed:
            self._guarded(self._sampler.arm)()
        if self.options.hold_batch and not self.closed:
            self._guarded(self._hold)()

    def _hold(self) -> None:
        """Hold this step's batch by reference, and let go of the last one."""
        self._holding.close()
        holder = Holder(self.anatomy.model, only_training=self.optimizer is not None)
        self._holding.enter_context(holder.installed())
        self._alarm.held = lambda: holder.batch

    def _end_step(self, *, loss_given: bool = False) -> None:
        step, sampled, self._ever_stepped = self.current_step, self.sampling, True
        ours, loss = self._losses.ours, self._losses.taken()
        if loss is not None and not loss_given:
            self._account.light.add(step, "loss", loss)
        heard, unseen = self._sampler.heard, ours and not self._sampler.opened
        self._account.note(self._alarm.taken())
        findings: list[Finding] = []
        self._guarded(self._record)(step, sampled, findings)
        self._meter.end_step(sampled=sampled)
        self._schedule.advance()
        if "watch" in self._boundary.failed:
            self._stand_down()
        self._arm()
        self._tell(step, sampled, findings)
        if sampled:
            self._check_silence(step, heard, unseen)

    def _record(self, step: int, sampled: bool, findings: list[Finding]) -> None:
        """Write the step; what all ranks found in it goes into ``findings``."""
        if sampled:
            table = self._sampler.disarm()
            self._account.failures(step, self._boundary)
            findings += self._account.sampled(step, table, self._meter)
            self._alarm.heed(findings)
        else:
            findings += self._account.flushed()

    def _finish(self, orderly: bool) -> None:
        self.voice.say(self._account.closed(orderly=orderly))

    def _deafness(self) -> list[Finding]:
        """Return a finding if an optimiser was given and never heard of."""
        moved = self.optimizer is not None and self.optimizer.state
        deaf = moved and not (self._ever_stepped or self._refused)
        return [deafness(0)] if deaf else []

    def _tell(self, step: int, sampled: bool, findings: list[Finding]) -> None:
        """Call what the user gave us; what that raises reaches the user."""
        self.voice.say(findings)
        for callback in self._step_ended:
            callback(step, sampled)

    def _check_silence(self, step: int, heard: Heard, unseen: bool) -> None:
        try:
            self._account.note(self._silence.checked(step, heard, unseen=unseen))
        except SilentSiteError:
            self.close(orderly=False)
            raise

    def _stand_down(self) -> None:
        """Something of ours is broken: be off, and let the training go on."""
        self.closed = True
        self._off.close()
        self._account.failures(self._schedule.step - 1, self._boundary)
        self._boundary.guarded("farewell", self._finish)(False)

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        return self._boundary.guarded("watch", call)


def _close(reference: "weakref.ref[Watch]") -> None:
    handle = reference()
    if handle is not None:
        handle.close()
