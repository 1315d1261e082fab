"""From a layout and a module to its projections, if the sizes agree."""

from dataclasses import replace

from torch import nn

from equipoise.anatomy.families import Fused, Layout, Paired, Separate
from equipoise.anatomy.paths import Place
from equipoise.anatomy.shapes import HEAD_COUNTS, count
from equipoise.anatomy.sites import Interleaved, Projections, Weight, effective

HEAD_WIDTHS = (
    *("head_dim", "head_size", "d_head", "dim_head", "attention_head_size"),
    "key_value_proj_dim",
)


def projections(place: Place, layout: Layout) -> Projections | None:
    """Return the four weights of an attention module, or None if they do not fit.

    Nor do packed weights: a quantised matrix holds codes, not the numbers they mean.
    """
    if isinstance(layout, Fused):
        made = _of_fused(place, layout)
    else:
        made = _of_several(place, layout)
    return made if made is not None and _are_numbers(made) else None


def _of_several(place: Place, layout: Separate | Paired) -> Projections | None:
    found = _pair(place, layout) if isinstance(layout, Paired) else _four(place, layout)
    if found is None:
        return None
    q, k, v, o = found
    heads = _heads(place.module, q.matrix().shape[0])
    if heads is None:
        return None
    # Keys say how many heads they have: their rows against the queries'.
    kv_heads = k.matrix().shape[0] * heads // q.matrix().shape[0]
    whole = kv_heads > 0 and heads % kv_heads == 0
    made = Projections(q=q, k=k, v=v, o=o, heads=heads, kv_heads=max(kv_heads, 1))
    return made if whole and _split(made) else None


Four = tuple[Weight, Weight, Weight, Weight]


def _four(place: Place, layout: Separate) -> Four | None:
    q, k, v, o = (place.weight(p) for p in (layout.q, layout.k, layout.v, layout.o))
    return None if q is None or k is None or v is None or o is None else (q, k, v, o)


def _pair(place: Place, layout: Paired) -> Four | None:
    """The first half of the rows of the pair are the keys', the rest the values'."""
    q, kv, o = (place.weight(p) for p in (layout.q, layout.kv, layout.o))
    if q is None or kv is None or o is None:
        return None
    half = kv.matrix().shape[0] // 2
    k, v = (replace(kv, rows=slice(i * half, (i + 1) * half)) for i in (0, 1))
    return q, k, v, o


def _of_fused(place: Place, layout: Fused) -> Projections | None:
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
    fused: Weight, sizes: tuple[int, int], counts: tuple[int, int], layout: Fused
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
