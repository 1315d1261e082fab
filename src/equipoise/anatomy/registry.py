"""From a model to its anatomy: declared families first, guesses second."""

from torch import nn

from equipoise.anatomy import guess
from equipoise.anatomy.families import FAMILIES, Fused, Layout, Separate
from equipoise.anatomy.names import named, unwrapped
from equipoise.anatomy.sites import Anatomy, AttentionSite, Projections, Weight

NORMS = ("LayerNorm", "RMSNorm")
HEAD_COUNTS = (
    "num_heads",
    "n_head",
    "num_attention_heads",
    "heads",
    "n_heads",
    "nhead",
)
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return where a model's attention, residual stream and norms are."""
    modules = list(named(model))
    blocks = guess.blocks(modules)
    sites = tuple(s for name, m in modules if (s := _site(name, m, list(blocks))))
    guessed = [f"projections of {s.name}" for s in sites if not s.declared]
    return Anatomy(
        model=model,
        names={id(module): name for name, module in modules},
        attention=sites,
        blocks=blocks,
        norms={n: m for n, m in modules if type(m).__name__.endswith(NORMS)},
        family=type(unwrapped(model)).__name__,
        guessed=tuple(guessed + ["blocks of the residual stream"]),
    )


def _site(name: str, module: nn.Module, blocks: list[str]) -> AttentionSite | None:
    layout = FAMILIES.get(type(module).__name__)
    found = layout or guess.layout(module)
    if found is None:
        return None
    return AttentionSite(
        name=name,
        module=module,
        layer=next(
            (i for i, b in enumerate(blocks) if f"{name}.".startswith(f"{b}.")), None
        ),
        projections=projections(module, found),
        declared=layout is not None,
    )


def projections(module: nn.Module, layout: Layout) -> Projections | None:
    """Return the four weights of an attention module, or None if they do not fit."""
    heads = _count(module, HEAD_COUNTS)
    if heads is None:
        return None
    kv_heads = _count(module, KV_COUNTS) or heads
    if isinstance(layout, Separate):
        q, k, v = (
            _weight(module, path, layout) for path in (layout.q, layout.k, layout.v)
        )
    else:
        q, k, v = _thirds(module, layout, heads, kv_heads)
    o = _weight(module, layout.o, layout)
    return Projections(q=q, k=k, v=v, o=o, heads=heads, kv_heads=kv_heads)


def _weight(module: nn.Module, path: str, layout: Layout) -> Weight:
    return Weight(module.get_submodule(path), transposed=layout.transposed)


def _thirds(
    module: nn.Module, layout: Fused, heads: int, kv_heads: int
) -> tuple[Weight, Weight, Weight]:
    fused = module.get_submodule(layout.qkv)
    rows = Weight(fused, transposed=layout.transposed).matrix().shape[0]
    width = rows // (heads + 2 * kv_heads)
    edges = [0, heads * width, (heads + kv_heads) * width, rows]

    def part(i: int) -> Weight:
        return Weight(
            fused, transposed=layout.transposed, rows=slice(edges[i], edges[i + 1])
        )

    return part(0), part(1), part(2)


def _count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None
