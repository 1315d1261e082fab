"""How much a run of a large model writes: numbers and bytes a sample, and their time.

``python -m benchmarks.sizes [1B 8B …]``: models with the layers and heads of 1B, 8B,
70B and 405B, and one number to a head, so that nothing is large but what is counted:
readings are a number for each layer or head, whatever its width. Each is watched for
some samples with the presets ``minimal`` and ``default``; bytes are what the file grew
by between two samples, and the writer's seconds are CPU time of writing the same
readings again, with nothing else.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F

import equipoise
from benchmarks.table import publish
from equipoise.records import Reading
from equipoise.store import RunWriter, open_run
from tests.models import GPT, GPTConfig

SHAPES = {"1B": (16, 32), "8B": (32, 32), "70B": (80, 64), "405B": (126, 128)}
"""Name → layers, query heads: of Llama 3."""
PRESETS: tuple[Literal["minimal", "default"], ...] = ("minimal", "default")
FIRST, SAMPLES = 2, 6
"""A file's first samples also write what stays: names of sites, tables."""
STEPS = 100_000


def watched(path: Path, layers: int, heads: int, preset: Any) -> list[list[Reading]]:
    """Watch a narrow model; return the readings of its samples, in order."""
    torch.manual_seed(0)
    sizes = {"width": heads, "heads": heads, "depth": layers, "ffn_width": 8}
    model = GPT(GPTConfig(**sizes, head_width=2, vocabulary=16, context=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"every": 1, "preset": preset, "dense_start": False}
    with equipoise.watch(model, optimizer, run=path, quiet=True, **options):
        for _ in range(FIRST + SAMPLES):
            tokens = torch.randint(0, 16, (1, 9))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            optimizer.zero_grad()
            F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
    news, _ = open_run(path).since(0, limit=1 << 40)
    by_step: dict[int, list[Reading]] = {}
    for reading in news.readings:
        by_step.setdefault(reading.step, []).append(reading)
    return [by_step[step] for step in sorted(by_step)]


def written(path: Path, samples: list[list[Reading]]) -> tuple[float, float]:
    """Write samples again; return bytes and CPU seconds of one beyond the first."""
    sizes, seconds = [], 0.0
    info = equipoise.records.RunInfo(name="sizes", created="now", version="0")
    for count in (FIRST, len(samples)):
        place = path.with_name(f"{count}.eqp")
        with RunWriter(place, info) as writer:
            start = time.process_time()
            for sample in samples[:count]:
                writer.append(sample)
            seconds = time.process_time() - start
        sizes.append(place.stat().st_size)
    more = len(samples) - FIRST
    return (sizes[1] - sizes[0]) / more, seconds / len(samples)


def row(name: str, preset: Any) -> dict[str, Any]:
    layers, heads = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        samples = watched(Path(folder) / "run.eqp", layers, heads, preset)
        size, seconds = written(Path(folder) / "run.eqp", samples)
    numbers = sum(len(row) for r in samples[-1] for row in r.values)
    least = next(n for n in (1, 10, 20, 50, 100, 200, 500) if size * STEPS / n < 10e9)
    return {
        "model": name,
        "preset": preset,
        "layers × heads": f"{layers} × {heads}",
        "numbers a sample": numbers,
        "kB a sample": round(size / 1e3, 1),
        "GB per 100,000 steps, every=10": round(size * STEPS / 10 / 1e9, 2),
        "writer's ms a sample": round(1e3 * seconds, 1),
        "least every= below 10 GB": least,
    }


def main() -> None:
    names = sys.argv[1:] or list(SHAPES)
    publish("sizes", [row(name, preset) for name in names for preset in PRESETS])


if __name__ == "__main__":
    main()
