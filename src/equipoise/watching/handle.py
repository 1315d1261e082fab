"""The handle a watched model is held by: counts steps, samples some, writes all."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sites import Anatomy
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import Boundary, Probe, UpdateProbe, attached
from equipoise.records import Finding, Reading
from equipoise.store import RunWriter
from equipoise.watching.collector import Collector
from equipoise.watching.derived import derived
from equipoise.watching.options import WatchOptions
from equipoise.watching.taps import tapped

log = logging.getLogger("equipoise")


class Watch:
    """Watches one model until closed; also a context manager.

    A step ends at ``optimizer.step()`` when an optimiser was given, and at ``.step()``
    otherwise. Hooks exist only between the end of one step and the end of a sampled
    one; off-sample the model runs exactly as if nobody watched.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        probes: Sequence[Probe],
        writer: RunWriter,
        *,
        optimizer: Optimizer | None,
        options: WatchOptions,
        step: int = 0,
    ) -> None:
        self.anatomy = anatomy
        self.options = options
        self._probes, self._writer, self._optimizer = probes, writer, optimizer
        self._step = step
        self._samples = 0
        self._collector = Collector()
        self._scalars: dict[str, Tensor | float] = {}
        self._boundary = Boundary(strict=options.strict)
        self._reported: set[str] = set()
        self._stack = ExitStack()
        self._sampling = ExitStack()
        self._tap = self._stack.enter_context(tapped())
        if optimizer is not None:
            handle = optimizer.register_step_post_hook(self._after_optimizer)
            self._stack.callback(handle.remove)
        self._stack.callback(lambda: self._sampling.close())
        self._arm()

    @property
    def path(self) -> Any:
        """Where the run is written."""
        return self._writer.path

    @property
    def sampling(self) -> bool:
        """Whether the step under way is one that is measured."""
        return self._step % self.options.every == 0

    def step(self, *, loss: Tensor | float | None = None, **scalars: float) -> None:
        """Add scalars to the current step; without an optimiser, also end the step."""
        named = {"loss": loss, **scalars} if loss is not None else scalars
        if self._optimizer is not None:
            # The optimiser's hook has already ended the step these belong to.
            step = max(self._step - 1, 0)
            self._write([_scalar(step, k, v) for k, v in named.items()])
            return
        self._scalars.update(named)
        self._end_step()

    def close(self) -> None:
        """Take every hook and patch off, and leave one finished file."""
        self._stack.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._scalars["learning_rate"] = optimizer.param_groups[0]["lr"]
        if self.sampling:
            for probe in self._probes:
                if isinstance(probe, UpdateProbe):
                    look = self._boundary.guarded(probe.name, probe.on_update)
                    look(optimizer, self._collector)
        self._end_step()

    def _arm(self) -> None:
        if self.sampling:
            self._sampling.enter_context(
                attached(
                    self._probes,
                    self.anatomy,
                    self._collector,
                    boundary=self._boundary,
                    only_training=self._optimizer is not None,
                )
            )

    def _end_step(self) -> None:
        sampled = self.sampling
        self._sampling.close()
        readings = self._light()
        if sampled:
            heavy = self._collector.readings(self._step)
            readings += heavy
            readings += derived(self._step, readings, list(self.anatomy.blocks))
        self._write(readings, self._failures())
        if sampled:
            self._samples += 1
            self._check_silence(readings)
        self._step += 1
        self._arm()

    def _light(self) -> list[Reading]:
        """Return the step's scalars: what every step costs."""
        losses, norm = self._tap.taken()
        if losses and "loss" not in self._scalars:
            self._scalars["loss"] = sum(losses[1:], losses[0])
        if norm is not None:
            self._scalars["gradient.norm.total"] = norm
        scalars, self._scalars = self._scalars, {}
        return [_scalar(self._step, name, value) for name, value in scalars.items()]

    def _write(self, readings: list[Reading], findings: Sequence[Finding] = ()) -> None:
        self._writer.append(readings, findings=findings)

    def _failures(self) -> list[Finding]:
        """Return a finding for each probe that died since the last step."""
        new = self._boundary.failed.keys() - self._reported
        self._reported |= new
        return [
            Finding(
                step=self._step,
                severity="warn",
                rule="probe.failed",
                message=f"the {name} probe failed and was detached: "
                f"{self._boundary.failed[name]!r}",
                advice="training is unaffected; please report the logged traceback",
            )
            for name in sorted(new)
        ]

    def _check_silence(self, readings: list[Reading]) -> None:
        if self._samples > 1 or not self.anatomy.attention:
            return
        heard = {
            s.split("#")[0] for r in readings for s in r.sites if "theta" in r.quantity
        }
        silent = [
            s.name for s in self.anatomy.attention if s.declared and s.name not in heard
        ]
        if silent:
            raise SilentSiteError(
                f"no attention call was seen at {', '.join(silent[:3])} in the first "
                f"sampled step ({len(silent)} of {len(self.anatomy.attention)} sites): "
                "the model may have been compiled before it was watched, or called "
                "otherwise than by model(...)"
            )


def _scalar(step: int, name: str, value: Tensor | float) -> Reading:
    return Reading.scalar(step, name, float(value))
