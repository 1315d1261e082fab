"""One process or many: what ``torchrun`` decided, and the model wrapped for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import distributed as dist
from torch import nn

from equipoise_lab.data.batches import RankShare, share

Parallel = Literal["ddp", "fsdp"]


@contextmanager
def process_group() -> Iterator[RankShare]:
    """Join the processes that ``torchrun`` started; alone, do nothing.

    A group that already exists is used and left alone.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield share()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield share()
    finally:
        dist.destroy_process_group()


def device() -> torch.device:
    """Return the GPU of this local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def wrapped(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the model as the group needs it; alone, as it is."""
    if not dist.is_initialized():
        return model
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # a second to import

    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


@contextmanager
def unsynchronised(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only in the last micro-batch of an accumulation."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    synchronise = getattr(model, "set_requires_gradient_sync", None)  # FSDP2's
    if synchronise is not None:
        synchronise(last)
    yield


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def averaged(value: torch.Tensor) -> torch.Tensor:
    """Return the mean over processes."""
    if not dist.is_initialized():
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
