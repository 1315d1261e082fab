"""``equipoise lab run fragility``: Baek's three experiments, piece by piece.

1. Does a predictor track the low-precision error within a format? Looks every few
   steps, over models, widths, seeds and formats.
2. Does κ_softmax lead the error or the loss? One look at every step.
3. Does moving ε help? Paired runs under every policy (``epsilon_control``).

A finished piece is a JSON file named after everything that decides it, and is not made
again.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from equipoise.errors import InputError
from equipoise.lab.data import DataOptions, cifar10
from equipoise.lab.results.evidence import Evidence, rounded, surroundings
from equipoise.lab.results.statistics import Runs
from equipoise.lab.studies.fragility.epsilon_control import controlled, policies
from equipoise.lab.studies.fragility.measurement import (
    Subject,
    byte_gpt,
    looks,
    tiny_vit,
)

QUESTION = "Where does low-precision error come from, who foresees it, and does ε help?"
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")
LOOK = (
    "seed",
    "step",
    "format",
    "loss",
    "measured",
    "ours",
    "v1",
    "v2",
    "kappa_softmax",
)
Say = Callable[[str], None]
Curves = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One run: a model, a seed, and what is asked of it."""

    experiment: str
    """``tracking``, ``leading`` or ``control``."""
    kind: str
    """``vit`` or ``gpt``."""
    width: int
    seed: int
    steps: int
    every: int = 1
    data: str = "digits"
    path: str = ""

    @property
    def file(self) -> str:
        # Where CIFAR-10 lies does not decide the outcome.
        given = json.dumps({**asdict(self), "path": ""})
        key = hashlib.sha256(given.encode()).hexdigest()[:8]
        name = f"{self.experiment}-{self.kind}-{self.width}-{self.data}"
        return f"{name}-seed-{self.seed}-{key}.json"

    @property
    def subject(self) -> Subject:
        if self.kind == "gpt":
            deep = {"depth": 4, "context": 32} if self.experiment == "control" else {}
            return byte_gpt(self.width, **deep)
        if self.data == "cifar10":
            data = DataOptions(source="cifar10", path=self.path)
        else:
            data = DataOptions(source="digits")
        return tiny_vit(self.width, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The three experiments as one plan."""

    quick: bool = False
    cifar10: Path | None = None
    """Where CIFAR-10's files are; digits alone without them."""

    @property
    def name(self) -> str:
        return "fragility-quick" if self.quick else "fragility"

    @property
    def command(self) -> str:
        quick = " --quick" if self.quick else ""
        data = " --data CIFAR-10" if self.cifar10 else ""
        return f"equipoise lab run fragility{quick}{data}"

    @property
    def plan(self) -> list[Piece]:
        """Return every piece, seed by seed."""
        seeds = (0, 1) if self.quick else (0, 1, 2)
        control = Piece(
            experiment="control",
            kind="gpt",
            width=32,
            seed=0,
            steps=40 if self.quick else 72,
            data="bytes",
        )
        pairs = range(2 if self.quick else 10)
        return [
            *(piece for seed in seeds for piece in self._watched(seed)),
            *(replace(control, seed=seed) for seed in pairs),
        ]

    def _watched(self, seed: int) -> Iterator[Piece]:
        where = str(self.cifar10) if self.cifar10 else ""
        models = [("vit", "digits", ""), ("gpt", "bytes", "")]
        models += [("vit", "cifar10", where)] if where else []
        for kind, data, path in models:
            for width in (32,) if self.quick else (96, 128):
                yield Piece(
                    experiment="tracking",
                    kind=kind,
                    width=width,
                    seed=seed,
                    steps=21 if self.quick else 101,
                    every=20,
                    data=data,
                    path=path,
                )
        yield Piece(
            experiment="leading",
            kind="vit",
            width=32 if self.quick else 96,
            seed=seed,
            steps=100 if self.quick else 195,
            data="cifar10" if where else "digits",
            path=where,
        )

    def finished(self, root: Path) -> list[Piece]:
        return [piece for piece in self.plan if (root / piece.file).is_file()]

    def check(self) -> None:
        """Refuse a folder in which CIFAR-10 is not."""
        if self.cifar10 is not None:
            cifar10(self.cifar10, train=False)

    def run(self, root: Path, *, workers: int | None, say: Say) -> None:
        """Make what is not finished, ``workers`` at a time; one per core by default."""
        root.mkdir(parents=True, exist_ok=True)
        done = self.finished(root)
        left = [piece for piece in self.plan if piece not in done]
        spawn = multiprocessing.get_context("spawn")
        count = workers or os.cpu_count() or 1
        with ProcessPoolExecutor(count, mp_context=spawn) as pool:
            jobs = [pool.submit(make, piece, root) for piece in left]
            try:
                for at, (piece, job) in enumerate(zip(left, jobs, strict=True)):
                    job.result()
                    say(f"{at + 1} of {len(left)}: {piece.file}")
            finally:  # after a failure nothing new is begun
                pool.shutdown(wait=False, cancel_futures=True)

    def evidence(self, root: Path) -> Evidence:
        """Return what the finished pieces came to."""
        done = self.finished(root)
        kinds = {piece.experiment for piece in done}
        missing = sorted({"tracking", "leading", "control"} - kinds)
        if missing:
            raise InputError(
                f"no finished run of {', '.join(missing)} in {root}; make them first: "
                f"{self.command}"
            )
        records = [json.loads((root / piece.file).read_text()) for piece in done]
        curves: Curves = {"tracking": {}, "leading": {}, "control": {}}
        runs: dict[str, Runs] = {}
        for piece, record in zip(done, records, strict=True):
            _file_away(piece, record["rows"], curves, runs)
        spent = sum(record["cpu_seconds"] for record in records) / 60
        return Evidence(
            name=self.name,
            question=QUESTION,
            measures=("loss", "bf16 error", "fp16 error"),
            seeds=tuple(sorted({p.seed for p in done if p.experiment == "tracking"})),
            arms={arm: {} for arm in runs},
            baselines={},
            runs=runs,
            curves=_short(curves),
            about={
                "command": self.command,
                **surroundings(),
                "cpu_minutes": rounded(spent),
            },
        )


def make(piece: Piece, root: Path) -> None:
    """Make one piece and leave its file behind, in one move."""
    torch.set_num_threads(1)
    start = time.process_time()
    rows = list(_control(piece) if piece.experiment == "control" else _looks(piece))
    spent = time.process_time() - start
    record = {"piece": asdict(piece), "cpu_seconds": spent, "rows": rows}
    draft = root / f".{piece.file}"
    draft.write_text(json.dumps(record))
    draft.rename(root / piece.file)


def _looks(piece: Piece) -> Iterator[dict[str, Any]]:
    formats = FORMATS if piece.experiment == "tracking" else ("fp16",)
    found = looks(
        piece.subject,
        seed=piece.seed,
        steps=piece.steps,
        every=piece.every,
        formats=formats,
    )
    return (asdict(look) for look in found)


def _control(piece: Piece) -> Iterator[dict[str, Any]]:
    subject = piece.subject
    for name, policy in policies(subject, piece.seed).items():
        run = controlled(subject, name, policy, seed=piece.seed, steps=piece.steps)
        yield asdict(run)


def _short(value: Any) -> Any:
    """Return numbers with seven digits: ε moves some of them in the fourth."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _file_away(
    piece: Piece,
    rows: list[dict[str, Any]],
    curves: Curves,
    runs: dict[str, Runs],
) -> None:
    if piece.experiment == "control":
        for row in rows:
            curves["control"].setdefault(row["policy"], []).append(row)
        return
    listed = [[row[name] for name in LOOK] for row in rows]
    subject = rows[0]["subject"]
    curves[piece.experiment].setdefault(subject, []).extend(listed)
    if piece.experiment == "tracking":
        last = {row["format"]: row for row in rows}
        runs.setdefault(subject, {})[piece.seed] = {
            "loss": last["fp16"]["loss"],
            **{f"{name} error": last[name]["measured"] for name in ("bf16", "fp16")},
        }
