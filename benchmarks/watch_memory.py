"""Attention over 8192 tokens, watched: how much higher is the peak?

Each contestant is a process of its own, because a peak cannot be taken back. The share
is of what training adds to an idle process, not of the interpreter's own memory.

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

LENGTH, STEPS = 8192, 1


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(*, watched: bool) -> dict[str, float]:
    """Return the peak of a step, and of the idle process before them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(width=128, depth=1, heads=2, context=LENGTH, vocabulary=256)
    model = GPT(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (1, LENGTH))
    idle = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        options = {"run": Path(folder) / "a.eqp", "every": 1}
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


def main() -> None:
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(train(watched=sys.argv[1] == "watched")))
        return
    rows = []
    for who in ("unwatched", "watched"):
        command = [sys.executable, "-m", "benchmarks.watch_memory", who]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        added = found["peak"] - found["idle"]
        rows.append({"who": who, **found, "added by training": added})
    plain, watched = (row["added by training"] for row in rows)
    rows.append({"who": "ratio", "added by training": watched / plain})
    rows[-1]["peak"] = rows[1]["peak"] / rows[0]["peak"]
    publish("watch_memory", rows, length=LENGTH)


if __name__ == "__main__":
    main()
