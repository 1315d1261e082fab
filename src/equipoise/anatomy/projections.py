"""The projections of an attention module, found by following a declaration's paths.

A layout that a module's sizes do not fit gives none. Under tensor parallelism the maps
of the heads that are on this rank are found too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from equipoise.anatomy import families
from equipoise.anatomy.head_counts import HEAD_COUNTS, count
from equipoise.anatomy.sharding import (
    Split,
    is_sharded,
    last_sharded_axis,
    sharded_axes,
    split,
    whole,
)
from equipoise.anatomy.sites import (
    Gated,
    Interleaved,
    Projections,
    Weight,
    effective,
    stored,
)


@dataclass(frozen=True, slots=True)
class Place:
    """A module under its name, among all the others."""

    name: str
    module: nn.Module
    modules: Mapping[str, nn.Module]
    """Every module of the model, by name."""

    def follow(self, path: str) -> tuple[str, nn.Module] | None:
        """Return (name, module) at a path, or None where there is nothing."""
        for choice in path.split("|"):
            name = _joined(self.name, choice)
            if name in self.modules:
                return name, self.modules[name]
        return None

    def weight(self, path: str) -> Weight | None:
        """Return the weight at a path: a module's, or a parameter of this module."""
        if _is_matrix(stored(self.module, path)):
            return Weight(self.module, path)
        found = self.follow(path)
        if found is None or not _is_matrix(stored(_base(found[1]), "weight")):
            return None
        return Weight(found[1], transposed=type(_base(found[1])).__name__ == "Conv1D")

    def fits(self, declaration: families.Declaration) -> bool:
        """Return whether this module has everything a declaration names."""
        if isinstance(declaration, families.Block):
            modules = (*declaration.feedforward, declaration.router)
            return all(self.follow(path) for path in modules if path)
        maps = _maps(declaration)
        return all(self.weight(path) is not None for path in maps)


def _maps(layout: families.Layout) -> tuple[str, ...]:
    if isinstance(layout, families.Fused):
        return layout.qkv, layout.o
    if isinstance(layout, families.Paired):
        return layout.q, layout.kv, layout.o
    return layout.q, layout.k, layout.v, layout.o


def _joined(name: str, path: str) -> str:
    while path.startswith(".."):
        name, path = name.rpartition(".")[0], path[2:]
    return f"{name}.{path}".strip(".")


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.ndim == 2


def _base(module: nn.Module) -> nn.Module:
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


HEAD_WIDTHS = (
    *("head_dim", "head_size", "d_head", "dim_head", "attention_head_size"),
    "key_value_proj_dim",
)


def projections(place: Place, layout: families.Layout) -> Projections | None:
    """Return the four weights of an attention module, or None if they do not fit.

    Nor do packed weights: a quantised matrix holds codes, not the numbers they mean.
    """
    if isinstance(layout, families.Fused):
        made = _of_fused(place, layout)
    else:
        made = _of_several(place, layout)
    return made if made is not None and _are_numbers(made) else None


def _of_several(
    place: Place, layout: families.Separate | families.Paired
) -> Projections | None:
    found = (
        _pair(place, layout)
        if isinstance(layout, families.Paired)
        else _four(place, layout)
    )
    if found is None:
        return None
    q, k, v, o = found
    heads = _heads(place.module, q.matrix().shape[0])
    if heads is None:
        return None
    if isinstance(layout, families.Separate) and layout.gated:
        if q.matrix().shape[0] % (2 * heads):
            return None
        q = replace(q, rows=Gated(heads))
    # Keys say how many heads they have: their rows against the queries'. So do values,
    # and where the two differ the maps hold more than their names say (a gate).
    kv_heads = k.matrix().shape[0] * heads // q.matrix().shape[0]
    if kv_heads != v.matrix().shape[0] * heads // o.matrix().shape[1]:
        return None
    whole = kv_heads > 0 and heads % kv_heads == 0
    made = Projections(q=q, k=k, v=v, o=o, heads=heads, kv_heads=max(kv_heads, 1))
    return made if whole and _split(made) else None


Four = tuple[Weight, Weight, Weight, Weight]


def _four(place: Place, layout: families.Separate) -> Four | None:
    q, k, v, o = (place.weight(p) for p in (layout.q, layout.k, layout.v, layout.o))
    return None if q is None or k is None or v is None or o is None else (q, k, v, o)


def _pair(place: Place, layout: families.Paired) -> Four | None:
    """The first half of the rows of the pair are the keys', the rest the values'."""
    q, kv, o = (place.weight(p) for p in (layout.q, layout.kv, layout.o))
    if q is None or kv is None or o is None:
        return None
    half = kv.matrix().shape[0] // 2
    k, v = (replace(kv, rows=slice(i * half, (i + 1) * half)) for i in (0, 1))
    return q, k, v, o


def _of_fused(place: Place, layout: families.Fused) -> Projections | None:
    """The output map's input is all heads side by side; the rest is k and v."""
    fused, o = place.weight(layout.qkv), place.weight(layout.o)
    if fused is None or o is None:
        return None
    inner, rows = o.matrix().shape[1], fused.matrix().shape[0]
    heads = _heads(place.module, inner)
    if heads is None or inner % heads or (rows - inner) % (2 * (inner // heads)):
        return None
    kv_heads = (rows - inner) // (2 * (inner // heads))
    if not kv_heads or heads % kv_heads:
        return None
    q, k, v = _thirds(fused, (inner, rows), (heads, kv_heads), layout)
    return Projections(q=q, k=k, v=v, o=o, heads=heads, kv_heads=kv_heads)


def _thirds(
    fused: Weight,
    sizes: tuple[int, int],
    counts: tuple[int, int],
    layout: families.Fused,
) -> tuple[Weight, Weight, Weight]:
    (inner, rows), (heads, kv_heads) = sizes, counts
    middle = inner + (rows - inner) // 2
    edges = {"q": (0, inner), "k": (inner, middle), "v": (middle, rows)}

    def part(letter: str) -> Weight:
        mine = Interleaved(kv_heads, heads // kv_heads, letter)
        chosen = mine if layout.interleaved else slice(*edges[letter])
        return Weight(fused.module, fused.attribute, fused.transposed, chosen)

    return part("q"), part("k"), part("v")


def _heads(module: nn.Module, rows: int) -> int | None:
    """Return how many query heads a module has, by its count or by its head width."""
    heads = count(module, HEAD_COUNTS)
    if heads is not None:
        return heads
    width = count(module, HEAD_WIDTHS)
    return rows // width if width and rows % width == 0 else None


def is_without_count(module: nn.Module) -> bool:
    """Say whether a module tells neither how many heads it has nor how wide one is."""
    return count(module, HEAD_COUNTS) is None and count(module, HEAD_WIDTHS) is None


def _are_numbers(made: Projections) -> bool:
    weights = [
        effective(w.module, w.attribute) for w in (made.q, made.k, made.v, made.o)
    ]
    return all(w.is_floating_point() and w.dtype.itemsize > 1 for w in weights)


def _split(made: Projections) -> bool:
    """Return whether every map divides into its heads."""
    rows = made.q.matrix().shape[0], made.v.matrix().shape[0]
    into = made.o.matrix().shape[1]
    even = not rows[0] % made.heads and not rows[1] % made.kv_heads
    return even and not into % made.heads


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
    if isinstance(weight.rows, Interleaved | Gated):
        if weight.rows.groups % parts:
            return None
        rows = replace(weight.rows, groups=weight.rows.groups // parts)
        return replace(weight, rows=rows, local=True)
    # A stretch of rows that holds queries, keys and values belongs to no head.
    return replace(weight, local=True) if weight.rows is None else None
