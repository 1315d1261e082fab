"""Two ranks that train one model, in every way we support; what they saw, as JSON.

Run as ``python -m tests.watching.two_ranks RANK PORT FOLDER``: one pair of processes
does all the scenarios, because starting torch twice takes longer than all of them.
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
from equipoise.probes import sharding
from equipoise.watching.ranks import group as ranks
from tests.watching.models import Digest, Late, TinyModel, batches, objective

STEPS = 5
NEVER = 1 << 30


def without_batch_norm(*, dropout: float = 0.0) -> TinyModel:
    """A model whose batch statistics do not depend on how a batch is split."""
    torch.manual_seed(0)
    model = TinyModel(dropout=dropout)
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


def half(batch: Tensor) -> Tensor:
    """What a data-parallel rank trains on."""
    return halves(batch)[dist.get_rank()]


def all_of_it(batch: Tensor) -> Tensor:
    """What every tensor-parallel rank trains on."""
    return torch.cat(halves(batch))


def train(
    model: nn.Module,
    *,
    run: Path | None,
    mine: Callable[[Tensor], Tensor] = half,
    poison: tuple[int, int] | None = None,
    left_out: tuple[int, int] | None = None,
    clip: bool = True,
    bits: bool = False,
    lr: float = 0.1,
    **options: Any,
) -> dict[str, Any]:
    """Return what this rank saw.

    ``poison`` is (rank, step) of an injected NaN, ``left_out`` of a step that is not
    made.
    """
    # SGD for the truth: Adam's signs would carry a rounding of 1e-8 to 1e-4.
    kind: Any = torch.optim.AdamW if bits else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01 if bits else lr, foreach=False)
    torch.manual_seed(dist.get_rank())
    handle, digest = None, Digest()
    if run is not None:
        options = {"every": 3 if bits else 2, "strict": True, **options}
        handle = equipoise.watch(model, optimizer, run=run, **options)
    for step, batch in enumerate(batches(20 if bits else STEPS)):
        loss = objective(model, mine(batch))
        if poison == (dist.get_rank(), step):
            loss = loss * float("nan")
        loss.backward()
        digest.step(loss, model)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if left_out != (dist.get_rank(), step):
            optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 1:
            digest.evaluation(model, batch)
    digest.end(model, optimizer)
    if handle is not None:
        handle.close()
    together: Any = handle._recorder.ranks if handle else None
    return {
        "bits": digest.parts(),
        "findings": [f.to_json() for f in handle.findings] if handle else [],
        "collectives": getattr(together, "collectives", 0),
    }


def scenarios(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    for name, wrap in (("ddp", ddp), ("fsdp", fsdp)):
        for kind, run in (("alone", None), ("watched", folder / f"{name}-bits.eqp")):
            model = wrap(without_batch_norm(dropout=0.2))
            out[f"{name}.{kind}"] = train(model, run=run, bits=True)
        out[f"{name}.truth"] = train(
            wrap(without_batch_norm()), run=folder / f"{name}.eqp"
        )
    for bad in (0, 1):
        run = folder / f"poison-{bad}.eqp"
        out[f"poison.{bad}"] = train(
            ddp(without_batch_norm()), run=run, poison=(bad, 1), every=2
        )
    run = folder / "fsdp-poison.eqp"
    out["fsdp.poison"] = train(fsdp(without_batch_norm()), run=run, poison=(1, 1))
    out |= tensor_parallel(folder)
    out["small buffer"] = _with_small_buffer(folder)
    out |= _on_devices(folder)
    out["budget"] = train(
        ddp(without_batch_norm()), run=folder / "b.eqp", every=1, budget=0.001
    )
    # No collective of the user's: nothing but our exchange holds the ranks together.
    out["other steps"] = train(
        without_batch_norm(), run=folder / "other.eqp", every=2 + rank
    )
    out["left out"] = train(
        without_batch_norm(), run=folder / "left.eqp", every=1, left_out=(1, 1)
    )
    out["apart"] = _apart(folder, rank)
    return out


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """Every rank sees the whole batch, and holds half of the heads."""
    # Not above: transformers takes seconds to import, and others import this module.
    from tests.watching.tensor_parallel import Llama, split_llama, split_tiny_model
    from tests.watching.wide_model import RATE, split_along_the_sequence, wide

    out: dict[str, Any] = {}
    for kind, run in (("alone", None), ("watched", folder / "tp-bits.eqp")):
        # The same dropout everywhere, or the ranks would train different models.
        model = split_tiny_model(without_batch_norm())
        out[f"tp.{kind}"] = train(model, run=run, mine=all_of_it, clip=False, bits=True)
    model, run = split_tiny_model(without_batch_norm()), folder / "tp.eqp"
    out["tp.truth"] = train(model, run=run, clip=False, mine=all_of_it, preset="deep")
    model, run = split_along_the_sequence(wide()), folder / "sequence.eqp"
    out["sequence.truth"] = train(
        model, run=run, mine=all_of_it, clip=False, preset="deep", lr=RATE
    )
    model, run = split_llama(Llama()), folder / "llama.eqp"
    out["llama.truth"] = train(model, run=run, mine=all_of_it, preset="deep")
    for bad in (0, 1):
        run = folder / f"tp-poison-{bad}.eqp"
        model = split_tiny_model(without_batch_norm())
        out[f"tp.poison.{bad}"] = train(
            model, run=run, poison=(bad, 1), mine=all_of_it, clip=False
        )
    return out


def _on_devices(folder: Path) -> dict[str, Any]:
    """As if the CPU copied to the host on its own, and took until it is waited for."""
    events: list[Late] = []

    def copy(packed: Tensor) -> tuple[Tensor, Late]:
        events.append(Late(packed, NEVER))
        return events[-1].buffer, events[-1]

    real, sharding.start_copy = sharding.start_copy, copy
    sharding.LATE_DEVICES.add("cpu")
    try:
        out = {"late": train(ddp(without_batch_norm()), run=folder / "late.eqp")}
        out["late"]["copies"] = len(events)
        out["ended"] = _ended(folder / "ended.eqp")
    finally:
        sharding.start_copy = real
        sharding.LATE_DEVICES.discard("cpu")
    return out


def _ended(run: Path) -> dict[str, Any]:
    """End after a sampled step, when one rank has asked for what was found in it."""
    model = ddp(without_batch_norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimizer, run=run, every=2, strict=True)
    objective(model, half(batches(1)[0])).backward()
    optimizer.step()
    asked = handle.verdict.state if dist.get_rank() == 0 else ""
    pending = handle.state_dict()["pending"]
    handle.close(orderly=False)
    return {"asked": asked, "pending": [name for _, name, _ in pending]}


def _with_small_buffer(folder: Path) -> dict[str, Any]:
    size, ranks.LEAST_BYTES = ranks.LEAST_BYTES, 64
    try:
        return train(ddp(without_batch_norm()), run=folder / "small.eqp")
    finally:
        ranks.LEAST_BYTES = size


def _apart(folder: Path, rank: int) -> dict[str, Any]:
    """Only the first rank watches: it must not wait for the other for ever."""
    ranks.ATTACH_TIMEOUT_S = 0.5
    found = train(
        ddp(without_batch_norm()), run=folder / "apart.eqp" if rank == 0 else None
    )
    dist.barrier()
    return found


def reported(scenarios: Callable[[Path], dict[str, Any]], *, ranks: int) -> None:
    """Be one of some ranks, and write what the scenarios say."""
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    (folder / f"rank-{rank}.json").write_text(json.dumps(scenarios(folder)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    reported(scenarios, ranks=2)
