"""A GPT whose projections are too wide to exchange whole, and ways to split it."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.probes.reading import gpt

WIDTH = 128
RATE = 0.02
"""Norms are followed by one step a sample: these weights move by 0.1 % in it."""


def wide() -> Any:
    """Two key heads serve four query heads; weights large enough to attend."""
    return gpt(width=WIDTH, depth=2, heads=4, kv_heads=2, tied=False, gain=2.0)


def plan() -> dict[str, ParallelStyle]:
    return {
        **{f"attention.{letter}_proj": ColwiseParallel() for letter in "qkv"},
        "attention.o_proj": RowwiseParallel(),
        "feedforward.up_proj": ColwiseParallel(),
        "feedforward.down_proj": RowwiseParallel(),
    }


def along_the_sequence() -> dict[str, ParallelStyle]:
    """Norms and the stream hold some tokens each; attention sees all of them."""
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        **plan(),
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**gather),
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "feedforward_norm": SequenceParallel(),
        "feedforward": PrepareModuleInput(**gather),
        "feedforward.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def split_along_the_sequence(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, along_the_sequence())
    enter = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
    )
    parallelize_module(model, mesh, {"blocks.0": enter})
    leave = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    more = {"final_norm": SequenceParallel(), "head": leave}
    return parallelize_module(model, mesh, more)
