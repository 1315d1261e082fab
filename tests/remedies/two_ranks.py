"""Two ranks that train one model with many remedies; what each saw, as JSON.

Run as ``python -m tests.remedies.two_ranks RANK PORT FOLDER``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from equipoise.remedies.catalogue import remedy
from tests.models import GPT, GPTConfig

REMEDIES: dict[str, dict[str, Any]] = {
    "learning_rate": {},
    "gradient_clip": {"limit": 0.1},
    "adaptive_clip": {},
    "spike_handling": {},
    "skip_step": {},
    "update_clip": {},
    "beta2": {},
    "qk_norm": {"steps": 2},
    "sigma_reparam": {},
    "residual_scale": {},
    "z_loss": {},
    "soft_cap": {},
    "qk_clip": {"limit": 0.05},
}


def sharded(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


KINDS = {"ddp": DistributedDataParallel, "fsdp": sharded}


def step(model: nn.Module, optimizer: Optimizer, rng: torch.Generator) -> None:
    """Train on this rank's own batch."""
    x = torch.randint(0, 32, (2, 8), generator=rng)
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()


def trained(kind: str, rank: int) -> dict[str, Any]:
    """Apply everything, train, undo; return weights and what was counted."""
    rng = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    shape = GPTConfig(width=16, depth=2, heads=2, vocabulary=32)
    model = KINDS[kind](GPT(shape))
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)
    step(model, optimizer, rng)
    undos = [
        remedy(name, **options).apply(model, optimizer)
        for name, options in REMEDIES.items()
    ]
    for _ in range(4):
        step(model, optimizer, rng)
    found = {name: summed(p) for name, p in model.named_parameters()}
    clipped = undos[-1].progress["clipped"]
    for undo in reversed(undos):
        undo()
    step(model, optimizer, rng)
    left = [name for name, _ in model.named_parameters()]
    return {"weights": found, "clipped": clipped, "left": left}


def summed(parameter: Tensor) -> float:
    """Return one number in which every weight counts differently."""
    here = parameter.detach()
    full = here.full_tensor() if hasattr(here, "full_tensor") else here
    weights = torch.arange(1, full.numel() + 1, dtype=torch.float64)
    return float((full.double().flatten() * weights).sum())


def main(rank: int, port: str, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {kind: trained(kind, rank) for kind in KINDS}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
