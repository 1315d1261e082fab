"""Attention over 8192 tokens, watched: how much higher is the peak?

Each contestant is a process of its own, because a peak cannot be taken back, and the
unwatched one loads nothing but torch and the model. A third one trains unwatched with
our libraries loaded (numba and LLVM, as large for a toy as for a real model): what it
has over the first is the constant of the installation, what the watched one has over it
is what watching takes. "file" is the part of the resident memory that is pages of files
on disk, which the system takes back when it needs them: most of that constant.

With ``counted`` torch's allocator counts instead, as it does on a GPU: bytes of tensors
at the fullest moment of a sampled step, model and optimiser included.

Run: python -m benchmarks.watch_memory [counted] [toy] [wide] [gpt2]
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.models import GPT, GPTConfig

LENGTH, STEPS = 8192, 1
# Width, depth, heads: what fits a minute of one core, a real width, a real model.
SHAPES = {"toy": (128, 1, 2), "wide": (768, 2, 12), "gpt2": (768, 12, 12)}
CONTESTANTS = ("unwatched", "unwatched, libraries loaded", "watched")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def file_mib() -> float:
    """Return how much of the resident memory is pages of files, where Linux says so."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssF")) / 1024


def load_libraries() -> None:
    """Load what a sampled step loads, kernels included."""
    import equipoise.watching.start  # noqa: F401
    from equipoise.numerics import token_statistics as visits
    from equipoise.numerics.rows.statistics import warm_up
    from equipoise.numerics.spectra.tracking import tracked_norm

    warm_up()
    x = torch.ones(1, 2, 2)
    for visit in (visits.token_sizes, visits.kurtosis, visits.token_cosine):
        visit(x)
    tracked_norm(x[0])


def monitored(model: Any, optimizer: Any, folder: str) -> AbstractContextManager[Any]:
    import equipoise

    run = Path(folder) / "a.eqp"
    return equipoise.watch(model, optimizer, run=run, every=1, strict=True)


def train(shape: str, who: str) -> dict[str, float]:
    """Return the peak of a step, and of the idle process before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, depth, heads = SHAPES[shape]
    sizes = {"context": LENGTH, "vocabulary": 256}
    model = GPT(GPTConfig(width=width, depth=depth, heads=heads, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (1, LENGTH))
    if who == "unwatched, libraries loaded":
        load_libraries()
    idle = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        watching = who == "watched"
        with monitored(model, optimizer, folder) if watching else nullcontext():
            for _ in range(STEPS):
                logits = model(tokens)
                F.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return {"idle": idle, "peak": peak_mib(), "file": file_mib()}


def allocated_mib(run: Callable[[], object]) -> float:
    """Return the most that torch's CPU allocator had given out at once."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    waiting: list[Any] = list(results.experimental_event_tree())
    most = 0
    while waiting:
        event = waiting.pop()
        waiting += event.children
        most = max(most, getattr(event.extra_fields, "total_allocated", 0) or 0)
    return most / 2**20


def counted(shape: str) -> list[dict[str, object]]:
    """Return the allocator's peaks of a step, unwatched and sampled."""
    load_libraries()
    plain, sampled = (
        allocated_mib(lambda who=who: train(shape, who))
        for who in ("unwatched", "watched")
    )
    return [
        {
            "shape": shape,
            "unwatched": plain,
            "sampled": sampled,
            "more": sampled / plain - 1,
        }
    ]


def measured(shape: str) -> list[dict[str, object]]:
    """Return the peaks of every contestant, and their ratios to the first two."""
    load_libraries()  # compiled once per installation: that is nobody's peak
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
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[1] in CONTESTANTS:
        sys.stdout.write(json.dumps(train(*arguments)))
        return
    from benchmarks.table import publish

    shapes = [name for name in arguments if name in SHAPES] or [*SHAPES]
    count = "counted" in arguments
    rows = [row for s in shapes for row in (counted if count else measured)(s)]
    publish("watch_memory_counted" if count else "watch_memory", rows, length=LENGTH)


if __name__ == "__main__":
    main()
