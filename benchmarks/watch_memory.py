"""Attention over 8192 tokens, watched: how much higher is the peak?

Each contestant is a process of its own, because a peak cannot be taken back. A third
one trains unwatched with the same libraries loaded (numba and its compiler, which are
as large for a toy as for a real model): what it has over the first is the constant of
the installation, what the watched one has over it is what watching takes.

Run: python -m benchmarks.watch_memory
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import equipoise
from benchmarks.table import publish
from equipoise.lab.models.gpt import GPT, GPTConfig
from equipoise.numerics.attention_rows import row_statistics, warm_up

LENGTH, STEPS = 8192, 1
# Width, depth, heads: what fits a minute of one core, and a model of a real size.
SHAPES = {"toy": (128, 1, 2), "wide": (768, 2, 12)}
CONTESTANTS = ("unwatched", "unwatched, libraries loaded", "watched")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(shape: str, who: str) -> dict[str, float]:
    """Return the peak of a step, and of the idle process before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, depth, heads = SHAPES[shape]
    sizes = {"context": LENGTH, "vocabulary": 256}
    model = GPT(GPTConfig(width=width, depth=depth, heads=heads, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (1, LENGTH))
    idle = peak_mib()
    if who == "unwatched, libraries loaded":
        warm_up()
        row_statistics(torch.randn(4, 64))
    with tempfile.TemporaryDirectory() as folder:
        options = {"run": Path(folder) / "a.eqp", "every": 1}
        watched = who == "watched"
        handle = equipoise.watch(model, optimizer, **options) if watched else None
        for _ in range(STEPS):
            logits = model(tokens)
            F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.close()
            assert not handle.findings, handle.findings
    return {"idle": idle, "peak": peak_mib()}


def measured(shape: str) -> list[dict[str, object]]:
    """Return the peaks of every contestant, and their ratios to the first two."""
    rows: list[dict[str, object]] = []
    for who in CONTESTANTS:
        command = [sys.executable, "-m", "benchmarks.watch_memory", shape, who]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"shape": shape, "who": who, **json.loads(done.stdout)})
    first, loaded, last = (float(str(row["peak"])) for row in rows)
    rows[1]["over unwatched"] = loaded / first
    rows[2]["over unwatched"] = last / first
    rows[2]["over loaded"] = last / loaded
    return rows


def main() -> None:
    if len(sys.argv) > 2:
        sys.stdout.write(json.dumps(train(*sys.argv[1:3])))
        return
    wanted = sys.argv[1:] or list(SHAPES)
    rows = [row for shape in wanted for row in measured(shape)]
    publish("watch_memory", rows, length=LENGTH)


if __name__ == "__main__":
    main()
