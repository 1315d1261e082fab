"""This rank's share of a norm that several ranks hold parts of."""

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from equipoise.anatomy.shards import local_part


def copies(x: Tensor, ranks: int) -> int:
    """Return how many of the ranks hold this very part, or this very summand."""
    if not isinstance(x, DTensor):
        return ranks
    sizes = zip(x.device_mesh.shape, x.placements, strict=True)
    apart = (n for n, p in sizes if not p.is_replicate())
    return max(1, ranks // prod(apart))


def share(x: Tensor, ranks: int, like: Tensor | None = None) -> Tensor:
    """Return this rank's share of ‖x‖₂: squares of all ranks' shares add up to ‖x‖²."""
    part = local_part(x.detach())
    wide = torch.promote_types(part.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=wide)
    held = copies(x if like is None else like, ranks)
    return norm if held == 1 else norm * held**-0.5


def is_partial(x: Tensor) -> bool:
    """Say whether the ranks hold summands, and none the sum: FSDP's total norm."""
    return isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)
