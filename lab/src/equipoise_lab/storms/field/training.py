"""Trains one unit under the instrument, as a user's script would."""

import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import equipoise
from equipoise.errors import InputError
from equipoise.judging.checks.checker import Checker
from equipoise.judging.facts import Facts
from equipoise.records import Finding
from equipoise_lab.storms.field.architectures import ARCHITECTURES, outputs
from equipoise_lab.storms.field.faults import FAULTS, Fault, Training
from equipoise_lab.storms.field.manifest import Unit
from equipoise_lab.storms.field.optimisers import RECIPES, share
from equipoise_lab.storms.field.recording import Recorded, from_run
from equipoise_lab.storms.field.tasks import HELD, TASKS, cross_entropy, loss_of

EVERY = 5
"""Steps between samples: runs of 400 steps stand for longer ones sampled less often."""
EVALUATED, ROWS = 8, 32
"""Held batches on which a unit and its twin are compared, and their rows."""
BEFORE, BEFORE_RATE, OTHER = 20, 2e-3, 5000
"""Warm-up and rate of the training before a run, and what is added to its seed."""
NOTHING = Fault(name="", part="open", family="rate")


def untrained(unit: Unit) -> nn.Module:
    """Return the model of a unit at initialisation."""
    torch.manual_seed(unit.seed)
    return ARCHITECTURES[unit.architecture].build(unit.vocabulary, unit.length)


def batch(unit: Unit, step: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step."""
    chosen = unit.seed if seed is None else seed
    rows = unit.batch if step < HELD else ROWS
    if unit.vocabulary > 5000:
        rows = min(rows, 4)
    task = TASKS[unit.task]
    return task.batch(chosen, step, rows, unit.length, unit.vocabulary)


def _forward(unit: Unit, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype.is_floating_point:
        x = x.to(next(model.parameters()).dtype)
    return outputs(ARCHITECTURES[unit.architecture].kind, model, x)


def _trained_before(unit: Unit, model: nn.Module) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), BEFORE_RATE)
    for step in range(unit.trained):
        optimiser.param_groups[0]["lr"] = BEFORE_RATE * min(1.0, (step + 1) / BEFORE)
        x, y = batch(unit, step, seed=unit.seed + OTHER)
        logits, extra = _forward(unit, model, x)
        optimiser.zero_grad()
        (cross_entropy(logits, y) + extra).backward()
        optimiser.step()


def evaluated(unit: Unit, model: nn.Module) -> float:
    """Return the mean plain cross-entropy over held batches; infinite if not finite."""
    model.eval()
    losses = []
    with torch.no_grad():
        for number in range(EVALUATED):
            x, y = batch(unit, HELD + number)
            losses.append(float(cross_entropy(_forward(unit, model, x)[0], y)))
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def run(unit: Unit, *, watched: bool = True) -> Recorded:
    """Train a unit to its end and return what is kept of it."""
    began = time.process_time()
    model = untrained(unit)
    _trained_before(unit, model)
    fault = FAULTS[unit.fault] if unit.fault else NOTHING
    state = Training(
        model=model,
        optimisers=[],
        onset=unit.onset,
        severity=unit.severity,
        vocabulary=unit.vocabulary,
        rng=torch.Generator().manual_seed(unit.seed + 77),
    )
    if fault.prepare is not None:
        fault.prepare(state)
    recipe = RECIPES[unit.optimiser]
    state.optimisers = recipe.make(model, recipe.rate * unit.rate)
    if not watched:
        losses = _train(unit, fault, state)
        return _recorded(unit, model, losses, began)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.eqp"
        try:
            handle = _watch(model, state.optimisers, path)
        except InputError as error:
            return _recorded(unit, model, [], began, refused=str(error))
        checker = handle._recorder.checker = KeepingChecker()
        with handle:
            losses = _train(unit, fault, state)
        details, readings, findings = from_run(path)
        return _recorded(
            unit,
            model,
            losses,
            began,
            details=details,
            readings=readings,
            findings=findings,
            facts=checker.kept,
        )


@dataclass(slots=True)
class KeepingChecker(Checker):
    """Keeps what it checks, so that changed checks can be asked again."""

    kept: list[Facts] = field(default_factory=list)

    def add(self, facts: Facts) -> list[Finding]:
        self.kept.append(facts)
        return Checker.add(self, facts)


def _watch(model: nn.Module, optimisers: list[Optimizer], path: Path) -> Any:
    given: Any = optimisers[0] if len(optimisers) == 1 else optimisers
    return equipoise.watch(model, given, run=path, every=EVERY, quiet=True)


def _recorded(
    unit: Unit, model: nn.Module, losses: list[float], began: float, **kept: Any
) -> Recorded:
    watched = {"details": {}, "readings": [], "findings": [], **kept}
    return Recorded(
        unit=unit.name,
        losses=losses,
        validation=math.inf if "refused" in kept else evaluated(unit, model),
        seconds=time.process_time() - began,
        versions={"torch": torch.__version__, "equipoise": equipoise.__version__},
        **watched,
    )


def _train(unit: Unit, fault: Fault, state: Training) -> list[float]:
    losses = list[float]()
    peaks = [[g["lr"] for g in o.param_groups] for o in state.optimisers]
    for step in range(unit.steps):
        wrong = bool(unit.fault) and step >= unit.onset
        if wrong and fault.before is not None:
            fault.before(state, step)
        at = (step + 1) / unit.steps
        factor = share(unit.schedule, unit.warmup, at) * state.rate_factor
        _set_rates(state.optimisers, peaks, factor)
        losses.append(_step(unit, fault if wrong else NOTHING, state, step))
    return losses


def _set_rates(
    optimisers: list[Optimizer], peaks: list[list[float]], factor: float
) -> None:
    for optimiser, rates in zip(optimisers, peaks, strict=True):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * factor


def _step(unit: Unit, fault: Fault, state: Training, step: int) -> float:
    """Take one step; return the plain cross-entropy of its batch."""
    x, y = batch(unit, step)
    if fault.data is not None:
        x, y = fault.data(state, step, x, y)
    logits, extra = _forward(unit, state.model, x)
    loss = loss_of(unit.loss, logits, y) + extra
    for optimiser in state.optimisers:
        optimiser.zero_grad()
    loss.backward()
    if fault.gradients is not None:
        fault.gradients(state, step)
    if unit.clip:
        nn.utils.clip_grad_norm_(state.model.parameters(), unit.clip)
    for optimiser in state.optimisers:
        optimiser.step()
    return float(cross_entropy(logits.detach(), y))
