"""Two ranks that read the curvature of one model, wrapped in each way."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from equipoise.auditing.curvature import (
    edge_of_stability,
    eigenvalues,
    gauss_newton,
    hessian,
    preconditioned,
    scale_of,
)
from tests.auditing.curvature import subjects


def sharded(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def stepped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> torch.optim.Optimizer:
    """Return Adam after a step, its weights put back so that ranks can be compared."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    before = [p.detach().clone() for p in model.parameters()]
    subjects.cross_entropy(model, batch).backward()
    optimizer.step()
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    return optimizer


def curvature(
    model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return what several ranks, or one, find out about a model."""
    ours = hessian(model, batch)
    v_N = torch.linspace(-1, 1, ours.width, dtype=torch.float64)
    even = preconditioned(ours, scale_of(model, optimizer))
    return {
        "hessian": ours(v_N),
        "cut": hessian(model, batch, micro_batch=1)(v_N),
        "gauss-newton": gauss_newton(model, batch)(v_N),
        "preconditioned": even(v_N),
        "top": eigenvalues(ours, 2)[1].value,
        "ratio": edge_of_stability(model, batch, optimizer).ratio,
    }


def rank(number: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=2)
    x, y = subjects.pair(4)
    mine = (x[number::2], y[number::2])
    found = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp": sharded}.items():
        model = wrap(subjects.gpt())
        found[name] = curvature(model, mine, stepped(model, mine))
    torch.save(found, Path(folder) / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()
