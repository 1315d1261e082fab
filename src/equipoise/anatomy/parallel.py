"""The projections of the heads that tensor parallelism leaves on this rank."""

from dataclasses import replace

from torch import Tensor

from equipoise.anatomy.shards import (
    Split,
    is_sharded,
    last_sharded_axis,
    sharded_axes,
    split,
    whole,
)
from equipoise.anatomy.sites import Interleaved, Projections, Weight


def is_whole(projections: Projections) -> bool:
    """Say whether this rank holds all four maps entirely."""
    held = (_tensor(getattr(projections, letter)) for letter in "qkvo")
    return not any(is_sharded(x) for x in held if x is not None)


def held_here(projections: Projections, heads: int) -> Projections | None:
    """Return the maps of the ``heads`` query heads here, or None where shards cut them.

    Queries, keys and values are sharded by rows, the output map by columns; a fused map
    only where its rows go group by group. Keys and values that all ranks hold whole
    serve if there is one head of them.
    """
    if is_whole(projections):
        return projections
    parts = {letter: _parts(getattr(projections, letter), letter) for letter in "qkvo"}
    if parts["q"] < 2 or parts["o"] != parts["q"] or parts["k"] != parts["v"]:
        return None
    q, k, v, o = (_local(getattr(projections, c), parts[c]) for c in "qkvo")
    if q is None or k is None or v is None or o is None:
        return None
    kv_heads = heads * projections.kv_heads // projections.heads
    if parts["k"] == 1:
        kv_heads = projections.kv_heads
        if kv_heads > 1:
            return None
    divides = kv_heads > 0 and q.matrix().shape[0] % heads == 0
    made = Projections(q=q, k=k, v=v, o=o, heads=heads, kv_heads=max(kv_heads, 1))
    return made if divides else None


def shard_of(weight: Weight) -> tuple[Tensor, Split] | None:
    """Return this rank's rows of a sharded map, or its columns as rows, and which.

    None where it is split both ways, where shards cut the rows of a fused map, and
    where adapters stand beside it.
    """
    held = _tensor(weight)
    axes = sharded_axes(held) if held is not None else ()
    if held is None or len(axes) != 1 or hasattr(weight.module, "base_layer"):
        return None
    (axis,) = axes
    found = split(held, axis)
    if axis != int(weight.transposed):
        return replace(weight, local=True).matrix().mT, found
    local = _local(weight, found.parts)
    return None if local is None else (local.matrix(), found)


def gathered_rows(weight: Weight) -> Tensor | None:
    """Return a map whole, with rows along the axis over which the model is split.

    All ranks must ask. FSDP's axis of the mesh comes before tensor parallelism's.
    """
    held = _tensor(weight)
    if held is None or hasattr(weight.module, "base_layer"):
        return None
    matrix = weight.part_of(whole(held.detach()))
    return matrix if last_sharded_axis(held) == int(weight.transposed) else matrix.mT


def _tensor(weight: Weight) -> Tensor | None:
    found = getattr(weight.module, weight.attribute, None)
    return found if isinstance(found, Tensor) else None


def _parts(weight: Weight, letter: str) -> int:
    """Return over how many ranks the axis of heads is split."""
    held = _tensor(weight)
    out = 1 if weight.transposed else 0
    return 0 if held is None else split(held, 1 - out if letter == "o" else out).parts


def _local(weight: Weight, parts: int) -> Weight | None:
    if isinstance(weight.rows, Interleaved):
        if weight.rows.groups % parts:
            return None
        rows = replace(weight.rows, groups=weight.rows.groups // parts)
        return replace(weight, rows=rows, local=True)
    # A stretch of rows that holds queries, keys and values is nobody's heads.
    return replace(weight, local=True) if weight.rows is None else None
