"""Two ranks that train one model, in every way we support; what they saw, as JSON.

Run as ``python -m tests.watching.group RANK PORT FOLDER``: one pair of processes does
all the scenarios, because starting torch twice takes longer than all of them.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import equipoise
from equipoise.watching import ranks
from tests.watching.patients import Patient, batches, objective

STEPS = 5


def calm(*, dropout: float = 0.0) -> Patient:
    """A patient whose batch statistics do not depend on how a batch is split."""
    torch.manual_seed(0)
    model = Patient(dropout=dropout)
    model.statistics = nn.Identity()  # type: ignore[assignment]
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def halves(batch: Tensor) -> tuple[Tensor, Tensor]:
    twice = torch.cat([batch, batch.flip(1)])
    return twice[0::2], twice[1::2]


def train(
    wrap: Callable[[nn.Module], nn.Module],
    *,
    run: Path | None,
    poison: tuple[int, int] | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Return what this rank saw; ``poison`` is (rank, step) of an injected NaN."""
    model = wrap(calm(dropout=dropout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    handle = None
    if run is not None:
        options = {"every": 2, "strict": True, **options}
        handle = equipoise.watch(model, optimizer, run=run, **options)
    losses = []
    for step, batch in enumerate(batches(STEPS)):
        mine = halves(batch)[dist.get_rank()]
        loss = objective(model, mine)
        if poison == (dist.get_rank(), step):
            loss = loss * float("nan")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if handle is not None:
        handle.close()
    together: Any = handle._account.ranks if handle else None
    return {
        "losses": losses,
        "weights": [_local(p).double().sum().item() for p in model.parameters()],
        "rng": torch.get_rng_state().double().sum().item(),
        "findings": [f.to_json() for f in handle.findings] if handle else [],
        "collectives": getattr(together, "collectives", 0),
    }


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


def scenarios(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    for name, wrap in (("ddp", ddp), ("fsdp", fsdp)):
        out[f"{name}.alone"] = train(wrap, run=None, dropout=0.2)
        out[f"{name}.watched"] = train(
            wrap, run=folder / f"{name}-dropout.eqp", dropout=0.2
        )
        out[f"{name}.truth"] = train(wrap, run=folder / f"{name}.eqp")
    for bad in (0, 1):
        run = folder / f"poison-{bad}.eqp"
        out[f"poison.{bad}"] = train(ddp, run=run, poison=(bad, 1), every=2)
    out["small buffer"] = _with_small_buffer(folder)
    out["budget"] = train(ddp, run=folder / "budget.eqp", every=1, budget=0.001)
    out["apart"] = _apart(folder, rank)
    return out


def _with_small_buffer(folder: Path) -> dict[str, Any]:
    size, ranks.LEAST_BYTES = ranks.LEAST_BYTES, 64
    try:
        return train(ddp, run=folder / "small.eqp")
    finally:
        ranks.LEAST_BYTES = size


def _apart(folder: Path, rank: int) -> dict[str, Any]:
    """Only the first rank watches: it must not wait for the other for ever."""
    ranks.ASSEMBLY_S = 0.5
    found = train(ddp, run=folder / "apart.eqp" if rank == 0 else None)
    dist.barrier()
    return found


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    (folder / f"rank-{rank}.json").write_text(json.dumps(scenarios(folder)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
