"""Ten thousand watched steps: does memory grow, do hooks pile up?

Run: python -m benchmarks.watch_soak
"""

import gc
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import equipoise
from benchmarks.table import publish
from tests.models import GPT, GPTConfig

STEPS, EVERY, REPORTS = 10_000, 10, 5


def resident_mib() -> float:
    """Return the memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig(width=16, depth=1, heads=2, context=8, vocabulary=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "soak.eqp"
        with equipoise.watch(model, optimizer, run=run, every=EVERY) as handle:
            for step in range(1, STEPS + 1):
                tokens = torch.randint(0, 16, (2, 9))
                logits = model(tokens[:, :-1])
                F.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten()
                ).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if step % (STEPS // REPORTS) == 1:
                    gc.collect()
                    rows.append(
                        {
                            "step": step,
                            "resident MiB": resident_mib(),
                            "objects": len(gc.get_objects()),
                            "hooks": hooks(model),
                        }
                    )
        findings = len(handle.findings)
        size = run.stat().st_size / 2**20
    growth = rows[-1]["resident MiB"] / rows[1]["resident MiB"] - 1
    publish("watch_soak", rows, growth=growth, findings=findings, file_mib=size)
    sys.stdout.write(f"growth after the first fifth: {growth:.2%}\n")


if __name__ == "__main__":
    main()
