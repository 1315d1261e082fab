"""The part of a tensor that lives on this rank, without asking the others."""

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_part(x: Tensor) -> Tensor:
    """Return what this rank holds: all of a plain tensor, a shard of a DTensor.

    Any other operation on a DTensor may communicate, which no hook may do.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def copies(x: Tensor, ranks: int) -> int:
    """Return how many of the ranks hold this very part."""
    if not isinstance(x, DTensor):
        return ranks
    sizes = x.device_mesh.shape
    split = (n for n, p in zip(sizes, x.placements, strict=True) if p.is_shard())
    return max(1, ranks // prod(split))


def is_sharded(x: Tensor) -> bool:
    """Say whether this rank holds only a part of the tensor."""
    return isinstance(x, DTensor) and any(isinstance(p, Shard) for p in x.placements)


def share(x: Tensor, ranks: int, like: Tensor | None = None) -> Tensor:
    """Return this rank's share of ‖x‖₂: squares of all ranks' shares add up to ‖x‖²."""
    norm: Tensor = torch.linalg.vector_norm(local_part(x.detach()), dtype=torch.float32)
    held = copies(x if like is None else like, ranks)
    return norm if held == 1 else norm * held**-0.5


def is_partial(x: Tensor) -> bool:
    """Say whether the ranks hold summands, and none the sum: FSDP's total norm."""
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)
