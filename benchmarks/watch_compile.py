"""What watching adds to compiled code: graphs, breaks, frames, and bits.

Run: python -m benchmarks.watch_compile [aot_eager inductor]
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import equipoise
from benchmarks.table import publish
from tests.models import GPT, GPTConfig

STEPS = 7


def wrapper(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def blocks(model: Any, backend: str) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def blocks_in_place(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def trained(
    wrap: Callable[..., Any], backend: str, run: Path | None
) -> tuple[list[Tensor], dict[str, int]]:
    """Return everything the training left behind, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = GPTConfig(width=32, depth=2, heads=2, context=16, dropout=0.1)
    model = wrap(GPT(config), backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = equipoise.watch(model, optimizer, run=run, every=3) if run else None
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (2, 17))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if handle is not None:
        handle.close()
        assert not handle.findings, handle.findings
    counted = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": counters["frames"]["total"],
    }
    left = [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]
    return left, counted


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for backend in sys.argv[1:] or ["aot_eager", "inductor"]:
        for wrap in (wrapper, in_place, blocks, blocks_in_place):
            alone, before = trained(wrap, backend, None)
            with tempfile.TemporaryDirectory() as folder:
                watched, after = trained(wrap, backend, Path(folder) / "a.eqp")
            same = all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
            added = {f"added {key}": after[key] - before[key] for key in before}
            row = {"backend": backend, "compiled": wrap.__name__, **before, **added}
            rows.append({**row, "identical": same})
    publish("watch_compile", rows, steps=STEPS)


if __name__ == "__main__":
    main()
