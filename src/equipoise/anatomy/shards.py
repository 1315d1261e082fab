"""What of a tensor lives on this rank, and which heads that is, without asking anybody.

Any operation on a DTensor but these may communicate, which no hook may do.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


class Split(NamedTuple):
    """Which of how many equal parts this rank holds."""

    part: int
    parts: int


WHOLE = Split(0, 1)


def local_part(x: Tensor) -> Tensor:
    """Return what this rank holds: all of a plain tensor, a shard of a DTensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_sharded(x: Tensor) -> bool:
    """Say whether this rank holds only a part of the tensor."""
    return isinstance(x, DTensor) and any(isinstance(p, Shard) for p in x.placements)


def needs_all_ranks(model: nn.Module) -> bool:
    """Say whether a pass waits for other ranks: FSDP2's modules, sharded weights.

    FSDP2's own weights are plain tensors between its gathering and its resharding.
    """
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        is_sharded(parameter) for parameter in model.parameters()
    )


def split(x: Tensor, axis: int) -> Split:
    """Return which part of one axis this rank holds; axes count from the front."""
    found = WHOLE
    if not isinstance(x, DTensor):
        return found
    for dimension, placement in enumerate(x.placements):
        if isinstance(placement, Shard) and placement.dim % x.ndim == axis:
            here = x.device_mesh.get_local_rank(dimension)
            size = x.device_mesh.size(dimension)
            found = Split(found.part * size + here, found.parts * size)
    return found


def sharded_axes(x: Tensor) -> set[int]:
    """Return the axes along which this rank holds only a part."""
    return {axis for axis in range(x.ndim) if split(x, axis).parts > 1}


def head_split(module: nn.Module | None) -> Split:
    """Return which heads of an attention module are here: tensor parallelism's part.

    Its maps to queries are sharded by rows, and a rank's rows are its heads'. FSDP's
    shards are whole while the module runs, so none are met here.
    """
    for parameter in module.parameters() if module is not None else ():
        for axis in range(parameter.ndim) if is_sharded(parameter) else ():
            found = split(parameter, axis)
            if found.parts > 1:
                return found
    return WHOLE
