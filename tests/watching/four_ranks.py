"""Four ranks, two by two: data parallel times tensor parallel; what they saw, as JSON.

Run as ``python -m tests.watching.four_ranks RANK PORT FOLDER``.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.watching.two_ranks import halves, reported, train
from tests.watching.wide_model import RATE, plan, wide


def sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan())
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def half(batch: Tensor) -> Tensor:
    """Ranks 0 and 1 are one copy of the model, 2 and 3 the other."""
    return halves(batch)[dist.get_rank() // 2]


def first_half(batch: Tensor) -> Tensor:
    return halves(batch)[0]


def scenarios(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways: dict[str, Any] = {
        "alone": {"run": None, "mine": half},
        "halves": {"run": folder / "halves.eqp", "mine": half, "preset": "deep"},
        "twins": {"run": folder / "twins.eqp", "mine": first_half, "preset": "deep"},
    }
    return {
        name: train(sharded(wide(), mesh), clip=False, lr=RATE, **way)
        for name, way in ways.items()
    }


if __name__ == "__main__":
    reported(scenarios, ranks=4)
