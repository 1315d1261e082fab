"""``equipoise lab run fragility``: Baek's three experiments, piece by piece.

1. Does a predictor track the low-precision error within a format? Looks every few
   steps, over models, widths, seeds and formats.
2. Does κ_softmax lead the error or the loss? One look at every step.
3. Does moving ε help? Paired runs under every policy (``epsilon_control``).

A finished piece is a JSON file named after everything that decides it. Beside them,
the recipe ``precision``: training itself in three formats.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from equipoise.errors import InputError
from equipoise_lab.data import DataOptions, cifar10
from equipoise_lab.models import vit_preset
from equipoise_lab.results.evidence import Evidence, rounded, surroundings
from equipoise_lab.results.statistics import Runs
from equipoise_lab.running.execution import write_record
from equipoise_lab.running.experiment import Arm, Experiment, short_hash
from equipoise_lab.running.workers import Failure, Watcher, Where, run_jobs, standing
from equipoise_lab.studies.fragility.epsilon_control import controlled, policies
from equipoise_lab.studies.fragility.measurement import (
    COLUMNS,
    FragilityModel,
    byte_gpt,
    readings,
    tiny_vit,
)
from equipoise_lab.training.options import Precision, TrainOptions
from equipoise_lab.training.trainer import Listener

QUESTION = "Where does low-precision error come from, who foresees it, and does ε help?"
FORMATS = ("fp16", "bf16", "e4m3", "e5m2")
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
    def name(self) -> str:
        return f"{self.experiment}-{self.kind}-{self.width}-{self.data} {self.seed}"

    @property
    def result(self) -> Path:
        # Where CIFAR-10 lies does not decide the outcome.
        key = short_hash(json.dumps({**asdict(self), "path": ""}))
        return Path(f"{self.name.replace(' ', '-seed-')}-{key}.json")

    @property
    def log(self) -> Path:
        return self.result.with_suffix(".log")

    @property
    def subject(self) -> FragilityModel:
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
    def tasks(self) -> list[Piece]:
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

    def check(self) -> None:
        """Refuse a folder in which CIFAR-10 is not."""
        if self.cifar10 is not None:
            cifar10(self.cifar10, train=False)

    def run(
        self,
        root: Path,
        *,
        on: Where = "local",
        workers: int | None = None,
        watcher: Watcher | None = None,
    ) -> list[Failure]:
        """Make every piece that is not finished; return those that failed."""
        return run_jobs(self.tasks, root, make, on=on, workers=workers, watcher=watcher)

    def evidence(self, root: Path) -> Evidence:
        """Return what the finished pieces came to."""
        done = standing(self.tasks, root).done
        kinds = {piece.experiment for piece in done}
        missing = sorted({"tracking", "leading", "control"} - kinds)
        if missing:
            raise InputError(
                f"no finished run of {', '.join(missing)} in {root}; make them first: "
                f"{self.command}"
            )
        records = [json.loads((root / piece.result).read_text()) for piece in done]
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
            curves=curves,
            about={
                "command": self.command,
                **surroundings(),
                "cpu_minutes": rounded(spent),
            },
            digits=None,
        )


def make(piece: Piece, root: Path, listener: Listener | None = None) -> None:
    """Make one piece and write its file; pieces are short and report no progress."""
    start = time.process_time()
    rows = list(_control(piece) if piece.experiment == "control" else _readings(piece))
    spent = time.process_time() - start
    record = {"piece": asdict(piece), "cpu_seconds": spent, "rows": rows}
    write_record(root / piece.result, record)


def _readings(piece: Piece) -> Iterator[dict[str, Any]]:
    formats = FORMATS if piece.experiment == "tracking" else ("fp16",)
    found = readings(
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
    listed = [[row[name] for name in COLUMNS] for row in rows]
    subject = rows[0]["subject"]
    curves[piece.experiment].setdefault(subject, []).extend(listed)
    if piece.experiment == "tracking":
        last = {row["format"]: row for row in rows}
        runs.setdefault(subject, {})[piece.seed] = {
            "loss": last["fp16"]["loss"],
            **{f"{name} error": last[name]["measured"] for name in ("bf16", "fp16")},
        }


def precision(quick: bool) -> Experiment:
    """Tiny-ViT of 65 tokens trained in fp32, bf16 and fp16, same seeds and data.

    Digits of 8 × 8 pixels, one pixel a patch, stand for CIFAR-10's 64 patches.
    """
    shape = replace(vit_preset("baek-tiny"), image=8, patch=1, channels=1)
    train = TrainOptions(
        steps=60 if quick else 195, batch=32, warmup=0, weight_decay=0.0
    )
    arms = tuple(
        Arm(
            name=f"{width}-{precision}",
            model=replace(shape, width=width),
            train=replace(train, precision=precision),
            data=DataOptions(source="digits"),
        )
        for width in (96, 128)
        for precision in get_args(Precision)
    )
    return Experiment(
        name="precision",
        question="Does the precision of training change what is learnt, or κ_softmax?",
        arms=arms[:3] if quick else arms,
        seeds=(0, 1) if quick else (0, 1, 2, 3, 4),
        measures=("validation", "accuracy", "loss", "spikes"),
    )
