"""Runs cases under the instrument, and says what it found and when.

Every case runs with generators seeded alike, in this process one after another; cases
of several ranks run in processes of their own. What the program trains is compared with
what it trains unwatched: the weights must be the same, bit for bit.
"""

import contextlib
import datetime
import importlib
import json
import os
import pkgutil
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

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
    """CPU time of the run, of all its ranks, the instrument's included."""
    error: str = ""
    """What the program raised, if it did."""

    def named(self, case: Case) -> bool:
        """Whether one of the case's codes is among what was found."""
        return any(code in self.first for code in case.codes)


def load(half: Half | None = None) -> list[Case]:
    """Import and return the cases, of one half or of all."""
    for one in get_args(Half):
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

    def close(self) -> None:
        """Close what is open, so that the run files are whole."""
        for handle in self.handles:
            handle.close()


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

    def close(self) -> None:
        """Nothing is open."""


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
    """Run a case under the instrument, and return what it found."""
    began, error = _cpu_seconds(), ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.ranks > 1:
            error = run_ranks(case, folder, wrong=wrong, seed=seed, options=options)
        else:
            watch = Recording(folder, options)
            with seeded(seed):
                try:
                    case.run(wrong, watch)
                # A boundary: a mistake may well end in an exception of the program's.
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
            watch.close()
        runs = [equipoise.open_run(path) for path in sorted(folder.glob("*.eqp"))]
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
        seconds=_cpu_seconds() - began,
        error=error,
    )


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def trained(
    case: Case, *, wrong: bool, watched: bool, seed: int = 0
) -> list[list[Tensor]]:
    """Return the weights of each model that a case attached, watched or not.

    Those of a case of several ranks follow one another, rank 0 first.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.ranks == 1:
            watch = Recording(folder, {}) if watched else Unwatched()
            with seeded(seed):
                case.run(wrong, watch)
            watch.close()
            return weights(watch)
        options: dict[str, Any] | None = {} if watched else None
        error = run_ranks(case, folder, wrong=wrong, seed=seed, options=options)
        assert not error, error
        saved = (torch.load(folder / f"weights-{r}.pt") for r in range(case.ranks))
        return [model for rank in saved for model in rank]


def weights(watch: "Recording | Unwatched") -> list[list[Tensor]]:
    """Return copies of the parameters of what was attached; of a shard, this rank's."""
    return [[_local(p) for p in model.parameters()] for model in watch.models]


def _local(parameter: Tensor) -> Tensor:
    local = getattr(parameter, "to_local", None)
    return (parameter if local is None else local()).detach().clone()


RANK_SECONDS = 540
"""A group that takes longer is ended: a rank waits for another that has left."""


def run_ranks(
    case: Case,
    folder: Path,
    *,
    wrong: bool,
    seed: int,
    options: dict[str, Any] | None,
) -> str:
    """Run a case in one process per rank, as torchrun does, and return what it raised.

    Without options it runs unwatched. Each rank leaves its weights in the folder.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_WAIT
    )
    (folder / "job.json").write_text(
        json.dumps(
            {
                "case": case.name,
                "half": case.half,
                "wrong": wrong,
                "seed": seed,
                "options": options,
            }
        )
    )
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks),
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(case.ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "equipoise_lab.mistakes.rank", str(folder)],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            )
    return _ended(processes, logs)


_WAIT = datetime.timedelta(seconds=60)


def _ended(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> str:
    """Wait for all ranks; return the last line of the first that failed."""
    ends = time.monotonic() + RANK_SECONDS
    try:
        for process in processes:
            process.wait(timeout=max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"TimeoutExpired: after {RANK_SECONDS} s, ranks waited for each other"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else f"exit code {process.returncode}"
    return ""


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
