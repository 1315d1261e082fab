"""What a run file costs: to append to, to read, and on disk.

``python -m benchmarks.store [STEPS]``; 10⁵ sampled steps unless said otherwise.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import publish
from equipoise.records import Reading, RunInfo
from equipoise.store import Run, RunWriter, open_run

LAYERS, HEADS = 36, 20
INFO = RunInfo(name="bench", created="2026-11-15T00:00:00+00:00", version="0")
SITES = tuple(f"transformer.h.{i}.attn" for i in range(LAYERS))
# Per sampled step, as ``watch`` reads them: quantities per head, and per layer.
WIDE, FLAT = 4, 26
# A view reads its own series only, so the long run needs few of them.
LONG_WIDE, LONG_FLAT = 1, 3


def sampled(
    step: int, values: list[list[float]], *, wide: int = WIDE, flat: int = FLAT
) -> list[Reading]:
    """Return the readings of a sampled step."""
    per_head = tuple(map(tuple, values))
    per_layer = tuple((row[0],) for row in values)
    heads = [_reading(step, f"head.{k}", per_head) for k in range(wide)]
    layers = [_reading(step, f"layer.{k}", per_layer) for k in range(flat)]
    return [Reading.scalar(step, "loss", 1 / (step + 1)), *heads, *layers]


def _reading(step: int, quantity: str, rows: tuple[tuple[float, ...], ...]) -> Reading:
    return Reading(step=step, quantity=quantity, sites=SITES, values=rows)


def light(step: int) -> list[Reading]:
    """Return what is written at every step."""
    names = ("loss", "learning_rate", "gradient.norm.total")
    return [Reading.scalar(step, name, 1 / (step + 1)) for name in names]


def appended(
    path: Path, batches: list[list[Reading]]
) -> tuple[list[float], list[float]]:
    """Return CPU and wall seconds of each append."""
    cpu, wall = [], []
    with RunWriter(path, INFO) as writer:
        for batch in batches:
            start = time.thread_time(), time.perf_counter()
            writer.append(batch)
            cpu.append(time.thread_time() - start[0])
            wall.append(time.perf_counter() - start[1])
    return cpu, wall


def append_row(name: str, path: Path, batches: list[list[Reading]]) -> dict[str, Any]:
    cpu, wall = appended(path, batches)
    return {
        "what": f"append {name}",
        "times": len(batches),
        "CPU ms, median": 1e3 * float(np.median(cpu)),
        "CPU ms, 99 %": 1e3 * float(np.quantile(cpu, 0.99)),
        "wall ms, median": 1e3 * float(np.median(wall)),
        "wall ms, worst": 1e3 * max(wall),
    }


def fill(path: Path, steps: int) -> float:
    """Write the long run, and return the CPU seconds it took."""
    values = np.random.default_rng(0).random((LAYERS, HEADS)).astype(np.float32)
    template = sampled(0, values.tolist(), wide=LONG_WIDE, flat=LONG_FLAT)
    start = time.process_time()
    with RunWriter(path, INFO) as writer:
        for step in range(steps):
            writer.append([_at(reading, step) for reading in template])
    return time.process_time() - start


def _at(reading: Reading, step: int) -> Reading:
    return Reading(
        step=step,
        quantity=reading.quantity,
        sites=reading.sites,
        values=reading.values,
    )


def read_row(name: str, action: Callable[[], object]) -> dict[str, Any]:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return {
        "what": name,
        "times": len(times),
        "wall ms, median": 1e3 * float(np.median(times)),
        "wall ms, worst": 1e3 * max(times),
    }


def reads(run: Run, steps: int) -> list[dict[str, Any]]:
    middle = (steps // 2, steps // 2 + steps // 100)
    return [
        read_row("open", lambda: open_run(run.path)),
        read_row("view, 1000 points, per head", lambda: run.summary("head.0")),
        read_row("view, 1000 points, per layer", lambda: run.summary("layer.1")),
        read_row("view, 1 % window", lambda: run.summary("head.0", between=middle)),
        read_row("first and last reading", lambda: run.ends("head.0")),
        read_row("all steps", lambda: run.steps),
        read_row("raw loss, whole run", lambda: run.series("loss")),
        read_row("raw per head, one site", lambda: run.series("head.0", SITES[3])),
        read_row("news, nothing new", lambda: run.since(10**9)),
    ]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    values = (
        np.random.default_rng(0).random((LAYERS, HEADS)).astype(np.float32).tolist()
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        batches = [sampled(step, values) for step in range(300)]
        rows = [
            append_row("a sampled step (31 readings)", place / "a.eqp", batches),
            append_row("3 scalars", place / "b.eqp", [light(s) for s in range(5000)]),
        ]
        cpu = fill(place / "long.eqp", steps)
        rows += reads(open_run(place / "long.eqp"), steps)
        size = (place / "long.eqp").stat().st_size
    numbers = steps * (LAYERS * (HEADS * LONG_WIDE + LONG_FLAT) + 1)
    publish(
        "store",
        rows,
        steps=steps,
        layers=LAYERS,
        heads=HEADS,
        fill_cpu_seconds=cpu,
        file_gigabytes=size / 1e9,
        bytes_per_value=size / numbers,
    )


if __name__ == "__main__":
    main()
