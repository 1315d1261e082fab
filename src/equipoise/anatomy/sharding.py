"""What part of a tensor is on this rank, and which heads, without communicating.

Any operation on a DTensor but these may communicate, which no hook may do. torch's own
modules are looked up, not imported: until a program imports them, which costs a second,
nothing in it is sharded.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement, Shard


_PLAIN = (Tensor, nn.Parameter)


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Say whether a tensor is torch's distributed one."""
    return type(x) not in _PLAIN and _is_instance(
        x, "torch.distributed.tensor", "DTensor"
    )


def _is_instance(x: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)


def _is_shard(placement: object) -> "TypeGuard[Shard]":
    return _is_instance(placement, "torch.distributed.tensor", "Shard")


def _gathers(module: nn.Module) -> bool:
    """Say whether FSDP2 gathers a module's weights while it runs."""
    return _is_instance(module, "torch.distributed.fsdp", "FSDPModule")


class Split(NamedTuple):
    """Which of how many equal parts this rank holds."""

    part: int
    parts: int


WHOLE = Split(0, 1)


def local_part(x: Tensor) -> Tensor:
    """Return what this rank holds: all of a plain tensor, a shard of a DTensor."""
    return x.to_local() if is_dtensor(x) else x


def is_sharded(x: Tensor) -> bool:
    """Say whether this rank holds only a part of the tensor."""
    return _times_split(x) > 0


def stays_sharded(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that no rank holds whole even while the model runs.

    FSDP2 gathers what it splits, over one axis of a mesh; tensor parallelism does not.
    """
    gathered = {
        id(parameter)
        for module in model.modules()
        if _gathers(module)
        for parameter in module.parameters()
    }
    return [p for p in model.parameters() if _times_split(p) > (id(p) in gathered)]


def _times_split(x: Tensor) -> int:
    return sum(map(splits, x.placements)) if is_dtensor(x) else 0


def splits(placement: "Placement") -> bool:
    """Say whether a placement leaves each rank a part: FSDP2's strided shards too."""
    return not (placement.is_replicate() or placement.is_partial())


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor by asking the other ranks, all of which must do so too."""
    return x.full_tensor() if is_dtensor(x) else x


def needs_all_ranks(model: nn.Module) -> bool:
    """Say whether a pass waits for other ranks: FSDP2's modules, sharded weights.

    FSDP2's own weights are plain tensors between its gathering and its resharding.
    """
    return any(map(_gathers, model.modules())) or any(
        is_sharded(parameter) for parameter in model.parameters()
    )


def split(x: Tensor, axis: int) -> Split:
    """Return which part of one axis this rank holds; axes count from the front."""
    return _place(x, lambda p: _is_shard(p) and p.dim % x.ndim == axis)


def summand(x: Tensor) -> Split:
    """Return which summand of a tensor this rank holds, where none holds the sum."""
    return _place(x, lambda p: p.is_partial())


def piece(x: Tensor) -> Split:
    """Return which piece this rank holds, over all axes."""
    return _place(x, splits)


def _place(x: Tensor, counts: "Callable[[Placement], bool]") -> Split:
    found = WHOLE
    if not is_dtensor(x):
        return found
    for dimension, placement in enumerate(x.placements):
        if counts(placement):
            here = x.device_mesh.get_local_rank(dimension)
            size = x.device_mesh.size(dimension)
            found = Split(found.part * size + here, found.parts * size)
    return found


def last_sharded_axis(x: Tensor) -> int | None:
    """Return the axis that the innermost mesh dimension splits, if any."""
    placements = x.placements if is_dtensor(x) else ()
    dims = [p.dim for p in placements if _is_shard(p)]
    return dims[-1] % x.ndim if dims else None


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
