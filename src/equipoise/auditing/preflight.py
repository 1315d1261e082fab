"""Run a user's unmodified script for a few steps, and judge its start.

The script is stopped from inside ``optimizer.step()`` with a ``SystemExit``, which
training scripts do not catch; what it writes until then is its own. The run file lives
in a temporary folder and goes with it.
"""

import math
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from equipoise.auditing.audit import Audit
from equipoise.auditing.one_pass import unlogged
from equipoise.auditing.precision.study import lost_epsilons
from equipoise.auditing.script_limits import Asked, TimeIsUp, limited
from equipoise.auditing.subject import ModelSource
from equipoise.errors import InputError
from equipoise.integrations.launcher import launched, owner
from equipoise.judging.judge import Judge
from equipoise.judging.rules.starts import STEPS, largest_stable_rate
from equipoise.judging.verdict import Verdict
from equipoise.numerics.formats import FORMATS
from equipoise.records import Finding, Reading
from equipoise.store import open_run
from equipoise.text.verdict_text import worded
from equipoise.watching.options import Preset

NARROW = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Enough(SystemExit):
    """Ends the user's script after the steps that were asked for."""


@dataclass(slots=True)
class Setup:
    """What a script's optimisers say about the training ahead."""

    steps: int = 0
    peak_lr: float = math.nan
    classes: int = 0
    roundoff: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    """Norm → its ε as a narrow format stores it."""
    adam: dict[str, float] = field(default_factory=dict)
    """Block → √v̂ over ε."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreFlight:
    """A verdict on the start of a training script."""

    verdict: Verdict
    steps: int
    peak_lr: float
    largest_stable_lr: float
    facts: tuple[str, ...]
    readings: tuple[Reading, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings

    def as_audit(self, script: str) -> Audit:
        """Return it as an audit of the last step that was read: to save and to show."""
        last = {reading.quantity: reading for reading in self.readings}
        return Audit(
            subject=script,
            verdict=self.verdict,
            readings=tuple(last.values()),
            facts=self.facts,
            source=ModelSource(name=f"the first {self.steps} steps of {script}"),
        )


def preflight(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = STEPS,
    peak_lr: float | None = None,
    preset: Preset = "default",
    seconds: float = 0.0,
) -> PreFlight:
    """Run a script until it has taken so many steps, and judge what was read.

    Args:
        script: A training script, as it is.
        arguments: Its own.
        steps: Optimiser steps to take.
        peak_lr: The schedule's largest learning rate, where the optimiser does not
            know it (a rate that the loop itself computes).
        preset: What is measured; ``deep`` adds curvature.
        seconds: After so long the script is ended, and judged by the steps it took; 0
            is without end.

    Raises:
        InputError: If there is no such script, it trained nothing, or it asks at the
            keyboard.
    """
    setup, code, cut = Setup(), 0, ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "preflight.eqp"
        paths: list[Path] = []
        with (
            _stopping_after(steps, setup),
            unlogged(),
            limited(seconds, lambda: setup.steps),
        ):
            try:
                launched(
                    script,
                    arguments,
                    report=paths.extend,
                    run=path,
                    every=1,
                    quiet=True,
                    preset=preset,
                    checks="active",
                )
            except Enough:
                pass
            except Asked as question:
                raise InputError(
                    f"{script} asks at the keyboard ({question.code!r}): give its "
                    "answer as an argument, or in the script"
                ) from None
            except TimeIsUp as end:
                cut = _cut(end, seconds)
            except SystemExit as end:
                code = _code(end)
        if not paths:
            raise InputError(
                f"{script} took no step with a torch optimiser{cut and f': {cut}'}"
            )
        run = open_run(paths[0])
        news, _ = run.since(0)
        findings = _of_a_start([*run.verdict.findings, *news.findings])
    if peak_lr is not None:
        setup.peak_lr = peak_lr
    found = judged(setup, news.readings, findings, code=code)
    return replace(found, facts=(*found.facts, cut)) if cut else found


def _cut(end: TimeIsUp, seconds: float) -> str:
    """Return why a script was ended from outside, in words."""
    if end.code == 128 + signal.SIGTERM:
        return "ended by SIGTERM"
    return f"ended after {seconds:g} s (--seconds gives it longer, 0 no end)"


def _of_a_start(findings: Sequence[Finding]) -> list[Finding]:
    """Return each finding once."""
    once = {(found.code, found.site): found for found in reversed(findings)}
    return list(reversed(once.values()))


def _code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextmanager
def _stopping_after(steps: int, setup: Setup) -> Iterator[None]:
    """Count the steps of the first optimiser, and end the script after them."""
    counted: list[int] = []

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not counted:
            counted.append(id(optimizer))
        setup.steps += counted[0] == id(optimizer)

    def stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # One more: the last step that is judged must be complete, and seen to be.
        if setup.steps > steps and counted[0] == id(optimizer):
            _look(optimizer, setup)
            raise Enough(0)

    hooks = (
        register_optimizer_step_post_hook(stepped),
        register_optimizer_step_pre_hook(stepping),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(optimizer: Optimizer, setup: Setup) -> None:
    """Note the schedule's peak, the formats, and how near gradients are to ε."""
    rates = [
        float(group[key])
        for group in optimizer.param_groups
        for key in ("lr", "initial_lr", "max_lr")
        if key in group
    ]
    setup.peak_lr = max(rates)
    model = owner(optimizer)
    if model is None:
        return
    setup.classes = _classes(model)
    names = {id(p): name for name, p in model.named_parameters()}
    setup.adam = _over_epsilon(optimizer, names)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) == 1 and (narrow := NARROW.get(dtypes.pop())):
        setup.roundoff = FORMATS[narrow].unit_roundoff
        setup.lost = lost_epsilons(model, FORMATS[narrow])


def _classes(model: nn.Module) -> int:
    """Return the vocabulary of a language model; 0 for anything else."""
    config = getattr(model, "config", None)
    given = getattr(config, "vocab_size", getattr(config, "vocabulary", 0))
    return given if isinstance(given, int) else 0


def _over_epsilon(optimizer: Optimizer, names: dict[int, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for group in optimizer.param_groups:
        eps, betas = group.get("eps") or 0.0, group.get("betas") or (0.0, 0.0)
        for parameter in group["params"] if eps else ():
            state = optimizer.state.get(parameter, {})
            # Matrices only: a key's bias has no gradient but rounding, for one.
            if "exp_avg_sq" not in state or parameter.dim() < 2:
                continue
            count = float(torch.as_tensor(state["step"]))
            mean = float(state["exp_avg_sq"].double().mean()) / (1 - betas[1] ** count)
            # No gradient at all is another matter: a row that was not looked up.
            if mean > 0:
                found[names.get(id(parameter), "")] = math.sqrt(mean) / eps
    return found


def judged(
    setup: Setup,
    readings: Sequence[Reading],
    findings: Sequence[Finding],
    *,
    code: int = 0,
) -> PreFlight:
    """Return the verdict on a start from what was read and what was set."""
    judge = Judge(
        {
            "peak_lr": setup.peak_lr,
            "classes": setup.classes,
            "roundoff": setup.roundoff,
            "coverage": {"steps": setup.steps},
            "reason": "failed" if code else "",
        },
        of="start",
    )
    early = [reading for reading in readings if reading.step <= STEPS]
    judge.add_at_once([*early, *_settings(setup)])
    judge.note(findings)
    stable = largest_stable_rate(judge.history)
    return PreFlight(
        verdict=worded(judge.verdict),
        steps=setup.steps,
        peak_lr=setup.peak_lr,
        largest_stable_lr=stable,
        facts=_facts(setup, stable, code),
        readings=tuple(readings),
    )


def _settings(setup: Setup) -> list[Reading]:
    """Return the script's settings as readings of the first step."""
    told = {"optimizer.root_v_over_eps": setup.adam, "start.epsilon": setup.lost}
    return [
        Reading(
            step=0,
            quantity=quantity,
            sites=tuple(rows),
            values=tuple((value,) for value in rows.values()),
        )
        for quantity, rows in told.items()
        if rows
    ]


def _facts(setup: Setup, stable: float, code: int) -> tuple[str, ...]:
    lines = [f"{setup.steps} optimiser steps taken"]
    if math.isfinite(setup.peak_lr):
        lines.append(
            f"peak learning rate {setup.peak_lr:.3g} (by the optimiser; --peak-lr if "
            "the loop itself sets a larger one)"
        )
    if math.isfinite(stable):
        lines.append(
            f"largest stable learning rate by the size of updates: {stable:.3g}"
        )
    if code:
        lines.append(f"the script itself ended with exit code {code}")
    return tuple(lines)
