"""From a model to its anatomy: declared families first, guesses second.

A class that is not declared is guessed by the names its authors usually give to
projections, blocks, feed-forward nets, norms and routers.
"""

import re
from collections.abc import Iterable, Mapping

from torch import nn

from equipoise.anatomy.families import (
    Block,
    Declaration,
    Fused,
    Layout,
    Paired,
    Separate,
    declared,
)
from equipoise.anatomy.projections import Place, projections
from equipoise.anatomy.recurrent import mixers
from equipoise.anatomy.routers import router, routers
from equipoise.anatomy.sites import (
    Anatomy,
    AttentionSite,
    Mixer,
    Placement,
    Router,
    named,
    unwrapped,
)

QUERIES = (
    *("q_proj", "query", "q_lin", "wq", "to_q", "q", "w_q", "query_proj", "linear_q"),
    *("W_q", "Wq", "WQ", "W_Q", "q_linear", "queries", "fc_q", "proj_q", "lin_q"),
    *("c_q", "project_q"),
)
FUSED = (
    *("c_attn", "qkv", "Wqkv", "query_key_value", "qkv_proj", "to_qkv", "in_proj"),
    *("W_qkv", "qkv_linear", "attn_qkv", "wqkv", "in_proj_weight", "to_q_k_v"),
)
PAIRS = ("to_kv", "kv", "kv_proj", "key_value", "Wkv", "W_kv", "kv_linear")
OUTPUTS = (
    *("o_proj", "out_proj", "c_proj", "out_lin", "wo", "proj", "to_out", "dense"),
    *("o", "w_o", "W_o", "Wo", "WO", "W_O", "out", "linear_out", "output", "fc_out"),
    *("o_linear", "out_linear", "proj_out", "to_out.0", "fc_o", "proj_o", "lin_out"),
    *(
        "projection",
        "attention_out",
        "..output.dense",
        "..out_proj",
        "..proj",
        "..dense",
        "..wo",
    ),
    *("..to_out", "..output", "final_linear"),
)
FEEDFORWARDS = (
    *("mlp", "ffn", "feedforward", "feed_forward", "ff", "ffwd", "moe"),
    "block_sparse_moe",
)
# What a block holds itself where its feed-forward part is no module.
PARTS = (("fc1", "fc2"), ("intermediate", "output"), ("linear1", "linear2"))
# A module with one of these mixes by convolution or recurrence: Mamba and its like.
RECURRENT = ("A_log", "dt_proj", "x_proj", "conv1d", "conv")
# Fused rows in an order of their own: no reading rather than a wrong one.
OWN_ORDER = {"CodeGenAttention"}
FIRST = ("input_", "pre_", "layernorm_before")
EARLY = ("input_", "pre_", "ln_1", "ln1", "norm1", "layernorm_before", "norm_1")


def guessed_layout(place: Place) -> Layout | None:
    """Return the projections a module seems to have, or None if none are so named."""
    module = place.module
    queries = [name for name in QUERIES if place.weight(name)]
    separate = next((names for q in queries if (names := _three(place, q))), None)
    # Attention may make a mask by a step (Doge); a fused map beside one is Mamba's.
    beside = {name for name in RECURRENT if hasattr(module, name)}
    allowed = {"dt_proj"} if separate else set()
    if type(module).__name__ in OWN_ORDER or beside - allowed:
        return None
    fused = next((name for name in FUSED if place.weight(name)), None)
    kv = next((name for name in PAIRS if queries and place.weight(name)), None)
    if fused is None and separate is None and kv is None:
        return None
    o = next((name for name in OUTPUTS if place.weight(name)), None)
    if o is None:
        return None
    if separate is not None:
        return Separate(q=separate[0], k=separate[1], v=separate[2], o=o)
    if fused is not None:
        # Megatron's name comes with Megatron's order, head by head.
        return Fused(qkv=fused, o=o, interleaved=fused == "query_key_value")
    assert kv is not None
    return Paired(q=queries[0], kv=kv, o=o)


def _three(place: Place, q: str) -> tuple[str, str, str] | None:
    names = q, sibling(q, "k"), sibling(q, "v")
    return names if all(place.weight(name) for name in names) else None


def sibling(query: str, letter: str) -> str:
    """Return the key's or value's name that goes with a query's name.

    >>> sibling("query_proj", "k"), sibling("W_Q", "v"), sibling("queries", "v")
    ('key_proj', 'W_V', 'values')
    """
    words = {"queries": {"k": "keys", "v": "values"}}
    words["query"] = {"k": "key", "v": "value"}
    for word, other in words.items():
        if word in query:
            return query.replace(word, other[letter])
    return query.replace("q", letter).replace("Q", letter.upper())


def stacks(
    modules: Mapping[str, nn.Module], sites: Iterable[str]
) -> dict[str, nn.Module]:
    """Return the lists of like modules that hold attention: the residual blocks.

    Where no attention is known by name, the longest list of like modules.
    """
    lists = [found for n, m in modules.items() if (found := _alike(n, m))]
    holding = [found for found in lists if _hold(found, sites)]
    outermost = [f for f in holding if not any(_inside(f, other) for other in holding)]
    chosen = outermost or sorted(lists, key=len)[-1:]
    return {name: module for found in chosen for name, module in found.items()}


def _alike(name: str, module: nn.Module) -> dict[str, nn.Module]:
    children = {f"{name}.{n}".lstrip("."): c for n, c in module.named_children()}
    alike = len({_kind(child) for child in children.values()}) == 1
    return children if alike and _is_list(module) else {}


def _is_list(module: nn.Module) -> bool:
    """torch.fx makes plain modules of containers; numbered children are left of them.

    >>> from torch.fx import symbolic_trace
    >>> inner = getattr(symbolic_trace(nn.Sequential(nn.Sequential(nn.ReLU()))), "0")
    >>> isinstance(inner, nn.Sequential), _is_list(inner)
    (False, True)
    """
    numbered = [name.isdecimal() for name, _ in module.named_children()]
    plain = type(module) is nn.Module and all(numbered)
    return plain or isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _kind(module: nn.Module) -> str:
    """Return the last word of a class name: hybrids list layers of several classes.

    >>> _kind(nn.TransformerEncoderLayer(4, 1, 4)), _kind(nn.ReLU())
    ('Layer', 'ReLU')
    """
    words = re.findall(r"[A-Z]+[a-z0-9]+", type(module).__name__)
    return words[-1] if len(words) > 1 else type(module).__name__


def _hold(found: Mapping[str, nn.Module], sites: Iterable[str]) -> bool:
    return any(f"{site}.".startswith(f"{name}.") for site in sites for name in found)


def _inside(found: Mapping[str, nn.Module], other: Mapping[str, nn.Module]) -> bool:
    first = next(iter(found))
    return any(first.startswith(f"{name}.") for name in other)


def feedforwards(name: str, block: nn.Module) -> dict[str, nn.Module]:
    """Return the feed-forward child of a block, by its name."""
    children = dict(block.named_children())
    named = next((n for n in FEEDFORWARDS if n in children), None)
    found = (named,) if named else next((p for p in PARTS if {*p} <= {*children}), ())
    return {f"{name}.{n}".lstrip("."): children[n] for n in found}


def placement(name: str, block: nn.Module, norms: Iterable[str]) -> Placement:
    """Return where a block's norms seem to be.

    A block that names a norm "input" or "1", or registers one before anything else,
    normalises first; a norm after the whole stack, outside it, says the same.
    """
    mine = [n.rpartition(".")[2] for n in norms if n.rpartition(".")[0] == name]
    if not mine:
        return ""
    if any(n.startswith(FIRST) for n in mine):
        return "pre"
    children = [child for child, _ in block.named_children()]
    early = any(n.startswith(EARLY) for n in mine) and children[0] in mine
    return "pre" if early or _closed_outside(name, norms) else "post"


def _closed_outside(name: str, norms: Iterable[str]) -> bool:
    """Return whether a norm is beside the list that holds this block."""
    home = name.rpartition(".")[0].rpartition(".")[0]
    return any(n.rpartition(".")[0] == home for n in norms)


NORMS = ("LayerNorm", "RMSNorm")
LAYOUTS = (Separate, Fused, Paired)


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return where a model's attention, residual stream and norms are."""
    modules = dict(named(model))
    blocks, found, guessed = _blocks(modules)
    gated = mixers(modules)
    sites = tuple(
        s
        for name in modules
        if (s := _site(Place(name, modules[name], modules), blocks))
        and (s.declared or not _is_gated(gated.get(name)))
    )
    norms = {n: m for n, m in modules.items() if _is_norm(m)}
    placement, placed = _placement(blocks, found, norms)
    return Anatomy(
        model=model,
        names={id(module): name for name, module in modules.items()},
        attention=sites,
        blocks=blocks,
        norms=norms,
        feedforwards=_feedforwards(modules, blocks, found),
        routers=_routers(modules, blocks, found),
        mixers=gated,
        placement=placement,
        family=type(unwrapped(model)).__name__,
        guessed=tuple(
            [f"projections of {s.name}" for s in sites if not s.declared]
            + ["blocks of the residual stream"] * guessed
            + ["where the norms are"] * (not placed)
        ),
    )


def _is_norm(module: nn.Module) -> bool:
    known = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return known or type(module).__name__.endswith(NORMS)


def _is_gated(mixer: Mixer | None) -> bool:
    """Return whether a module forgets by a rate: then its q and k are no attention's.

    A short convolution, or a step that nothing else explains, may be part of attention.
    """
    return mixer is not None and mixer.kind not in ("convolution", "unknown")


def _declaration(place: Place, kinds: tuple[type, ...]) -> Declaration | None:
    known = declared(type(place.module).__name__)
    fitting = (d for d in known if isinstance(d, kinds) and place.fits(d))
    return next(fitting, None)


def _site(place: Place, blocks: Mapping[str, nn.Module]) -> AttentionSite | None:
    known = _declaration(place, LAYOUTS)
    layout = known or guessed_layout(place)
    if layout is None or isinstance(layout, Block):
        return None
    return AttentionSite(
        name=place.name,
        module=place.module,
        layer=next((i for i, b in enumerate(blocks) if _within(place.name, b)), None),
        projections=projections(place, layout),
        declared=known is not None,
        weights=layout.weights,
    )


def _blocks(
    modules: Mapping[str, nn.Module],
) -> tuple[dict[str, nn.Module], dict[str, Block], bool]:
    """Return the blocks, the declarations of some, and whether any was guessed."""
    found: dict[str, Block] = {}
    for name, module in modules.items():
        known = _declaration(Place(name, module, modules), (Block,))
        if isinstance(known, Block):
            found[name] = known
    sites = [n for n in modules if _is_attention(Place(n, modules[n], modules))]
    rest = [s for s in sites if not any(_within(s, block) for block in found)]
    guessed = {} if found and not rest else stacks(modules, rest)
    if found:
        guessed = {n: m for n, m in guessed.items() if any(_within(s, n) for s in rest)}
    chosen = {n: modules[n] for n in modules if n in found or n in guessed}
    return chosen, found, bool(guessed)


def _is_attention(place: Place) -> bool:
    declared = _declaration(place, LAYOUTS)
    return declared is not None or guessed_layout(place) is not None


def _placement(
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
    norms: Mapping[str, nn.Module],
) -> tuple[Placement, bool]:
    """Return the first block's placement, and whether it was declared."""
    for name, block in blocks.items():
        if name in found:
            where = found[name].placement
            return (where(block) if callable(where) else where), True
        return placement(name, block, norms), False
    return "", True


def _feedforwards(
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if name not in found:
            made |= feedforwards(name, block)
            continue
        place = Place(name, block, modules)
        made |= dict(at for p in found[name].feedforward if (at := place.follow(p)))
    return made


def _routers(
    modules: Mapping[str, nn.Module],
    blocks: Mapping[str, nn.Module],
    found: Mapping[str, Block],
) -> dict[str, Router]:
    made = routers(modules)
    for name in blocks:
        if name in found and found[name].router:
            at = Place(name, blocks[name], modules).follow(found[name].router)
            assert at is not None  # a declaration that fits has its router
            made[at[0]] = router(at[1], modules[at[0].rpartition(".")[0]])
    return made


def _within(name: str, block: str) -> bool:
    return f"{name}.".startswith(f"{block}.") or block == ""
