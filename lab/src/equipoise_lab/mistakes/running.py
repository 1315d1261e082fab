"""Runs cases under the instrument, and says what it found and when.

Every case runs with generators seeded alike, in this process one after another; cases
of several ranks run in processes of their own. What the program trains is compared with
what it trains unwatched: the weights must be the same, bit for bit.
"""

import contextlib
import importlib
import pkgutil
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import equipoise
from equipoise_lab.mistakes.case import CASES, Case, Half


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the instrument said of one run of a case."""

    case: str
    wrong: bool
    state: str
    """The verdict at the end."""
    first: dict[str, int] = field(default_factory=dict)
    """Code of each warning or error → the step at which it was first found."""
    seconds: float = 0.0
    """CPU time of the run, the instrument's included."""
    error: str = ""
    """What the program raised, if it did."""

    def named(self, case: Case) -> bool:
        """Whether one of the case's codes is among what was found."""
        return any(code in self.first for code in case.codes)


def load(half: Half | None = None) -> list[Case]:
    """Import and return the cases, of one half or of both."""
    for one in ("opened", "sealed"):
        package = importlib.import_module(f"equipoise_lab.mistakes.{one}")
        for module in pkgutil.iter_modules(package.__path__):
            if half in (None, one):
                importlib.import_module(f"{package.__name__}.{module.name}")
    return [case for case in CASES.values() if half in (None, case.half)]


class Recording:
    """Attaches the instrument for a case, and keeps every handle it gave."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.handles: list[equipoise.Watch] = []
        self.models: list[nn.Module] = []
        self.callbacks: list[Any] = []

    def __call__(self, model: Any, optimizer: Any = None, **options: Any) -> Any:
        self.models.append(model)
        given = {**self._where(), **options}
        self.handles.append(equipoise.watch(model, optimizer, **given))
        return self.handles[-1]

    def trainer_callback(self, **options: Any) -> Any:
        from equipoise.integrations.hf import EquipoiseCallback

        self.callbacks.append(EquipoiseCallback(**{**self._where(), **options}))
        return self.callbacks[-1]

    def lightning_callback(self, **options: Any) -> Any:
        from equipoise.integrations.lightning import EquipoiseCallback

        self.callbacks.append(EquipoiseCallback(**{**self._where(), **options}))
        return self.callbacks[-1]

    def _where(self) -> dict[str, Any]:
        number = len(self.handles) + len(self.callbacks)
        return {"run": self._folder / f"{number}.eqp", "quiet": True, **self._options}

    def runs(self) -> list[Path]:
        """Close what is open, and return the run files, in order."""
        for handle in self.handles:
            handle.close()
        return sorted(self._folder.glob("*.eqp"))


class Unwatched:
    """Attaches nothing: how a case runs by itself."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def __call__(self, model: Any, optimizer: Any = None, **options: Any) -> Any:
        self.models.append(model)
        return contextlib.nullcontext()

    def trainer_callback(self, **options: Any) -> Any:
        from transformers import TrainerCallback

        return TrainerCallback()

    def lightning_callback(self, **options: Any) -> Any:
        from lightning.pytorch.callbacks import Callback

        return Callback()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every generator a case may draw from, and put all back as they were."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def outcome(case: Case, *, wrong: bool, seed: int = 0, **options: Any) -> Outcome:
    """Run a case of one process under the instrument, and return what it found."""
    assert case.ranks == 1, f"{case.name} runs on {case.ranks} ranks"
    began, error = time.process_time(), ""
    with tempfile.TemporaryDirectory() as folder, seeded(seed):
        watch = Recording(Path(folder), options)
        try:
            case.run(wrong, watch)
        # A boundary: a mistake may well end in an exception of the program's own.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        runs = [equipoise.open_run(path) for path in watch.runs()]
        found = [f for run in runs for f in run.findings if f.severity != "info"]
        states = [run.verdict.state for run in runs]
    first: dict[str, int] = {}
    for finding in found:
        first[finding.code] = min(finding.step, first.get(finding.code, finding.step))
    return Outcome(
        case=case.name,
        wrong=wrong,
        state=states[0] if states else "",
        first=first,
        seconds=time.process_time() - began,
        error=error,
    )


def trained(case: Case, *, wrong: bool, watched: bool, seed: int = 0) -> list[Any]:
    """Return the weights that a case ends with, watched or not."""
    with tempfile.TemporaryDirectory() as folder, seeded(seed):
        watch: Any = Recording(Path(folder), {}) if watched else Unwatched()
        case.run(wrong, watch)
        if watched:
            watch.runs()
        return [[p.detach().clone() for p in m.parameters()] for m in watch.models]


def rates(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return counts: mistakes named, named by step 2, and warnings of correct runs."""
    known = {case.name: case for case in cases}
    wrong = [o for o in outcomes if o.wrong]
    right = [o for o in outcomes if not o.wrong]
    named = [o for o in wrong if o.named(known[o.case])]
    early = [o for o in named if _when(o, known[o.case]) <= 2]
    warned = [o for o in right if o.first]
    return {
        "mistakes": len(wrong),
        "named": len(named),
        "named by step 2": len(early),
        "called healthy": sum(o.state == "healthy" for o in wrong),
        "correct programs": len(right),
        "correct programs warned": len(warned),
        "correct programs warned by a check": sum(
            any(code.startswith("check.") for code in o.first) for o in right
        ),
        "correct programs healthy": sum(o.state == "healthy" for o in right),
    }


def _when(found: Outcome, case: Case) -> int:
    return min(found.first[code] for code in case.codes if code in found.first)
