"""Which tensors of a checkpoint are projections, norms and feed-forward maps.

By family first: the declarations of ``anatomy.families`` name a module's maps by their
paths, and a path is a part of a tensor's name. Names that no family declares but that
everybody uses stand in ``NAMED``. Shapes decide how a map is stored and split.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.anatomy.families import FAMILIES, Fused, Layout, Paired, Separate
from equipoise.anatomy.head_counts import HEAD_COUNTS
from equipoise.anatomy.sites import Interleaved
from equipoise.auditing.weights.entries import Checkpoint, Entry

NAMED: tuple[Layout, ...] = (
    Separate(q="attn_q", k="attn_k", v="attn_v", o="attn_output"),
    Fused(qkv="attn_qkv", o="attn_output"),
    Separate(q="wq", k="wk", v="wv", o="wo"),
    Separate(q="q_proj", k="k_proj", v="v_proj", o="dense"),
    Separate(q="to_q", k="to_k", v="to_v", o="to_out.0|to_out"),
    Separate(q="linear_q", k="linear_k", v="linear_v", o="linear_out"),
)
"""GGUF, Meta's Llama, Phi, diffusers, ESPnet."""
UP = re.compile(
    r"(up_proj|gate_proj|gate_up_proj|fc1|c_fc|fc_in|wi|wi_0|wi_1|dense_h_to_4h|"
    r"intermediate\.dense|linear1|w1|w3|ffn_up|ffn_gate|lin1|ffn|Wi|"
    r"intermediate_dense)\.weight$"
)
DOWN = re.compile(
    r"(down_proj|fc2|mlp\.c_proj|fc_out|wo|dense_4h_to_h|output\.dense|linear2|w2|"
    r"ffn_down|lin2|ffn_output|mlp\.Wo|output_dense)\.weight$"
)
NORM = re.compile(r"(norm|ln|layernorm|layer_norm)[\w.]*$", re.IGNORECASE)
LAYER = re.compile(r"^(.*?\.?\d+)(?:\.|$)")
EPSILONS = (
    *("layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon", "norm_eps", "epsilon"),
    *("layernorm_epsilon", "norm_epsilon", "layer_norm_rms_epsilon"),
)
WIDTHS = ("head_dim", "d_kv", "attention_head_size", "per_head", "head_width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """Some rows of a stored matrix."""

    tensor: str
    transposed: bool = False
    rows: slice | Interleaved | None = None

    def of(self, stored: Tensor) -> Tensor:
        """Return the map itself, outputs × inputs."""
        matrix = stored.mT if self.transposed else stored
        if isinstance(self.rows, Interleaved):
            return self.rows.rows(matrix)
        return matrix if self.rows is None else matrix[self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """The four maps of one attention module, and its heads where they are known."""

    site: str
    q: Map
    k: Map
    v: Map
    o: Map
    heads: int | None = None
    kv_heads: int | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(dict.fromkeys(m.tensor for m in (self.q, self.k, self.v, self.o)))


def attentions(checkpoint: Checkpoint) -> list[AttentionLayout]:
    """Return every attention module whose four maps are there, in stored order."""
    found: dict[str, AttentionLayout] = {}
    ends: dict[str, list[str]] = {}
    for name in checkpoint.entries:
        ends.setdefault(_last(name.removesuffix(".weight")), []).append(name)
    for layout in _layouts():
        for site in _sites(ends, layout):
            if site not in found:
                made = _made(checkpoint, site, layout)
                if made is not None:
                    found[site] = made
    order = {name: i for i, name in enumerate(checkpoint.entries)}
    return sorted(found.values(), key=lambda a: order[a.q.tensor])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _layouts() -> Iterator[Layout]:
    seen = []
    for declarations in FAMILIES.values():
        for declaration in declarations:
            if isinstance(declaration, Layout) and declaration not in seen:
                seen.append(declaration)
    yield from (*seen, *NAMED)


def _first(layout: Layout) -> str:
    return layout.qkv if isinstance(layout, Fused) else layout.q


def _sites(ends: Mapping[str, list[str]], layout: Layout) -> Iterator[str]:
    """Yield the modules that have the layout's first map."""
    path = _first(layout)
    for name in ends.get(_last(path), ()):
        stem = name.removesuffix(".weight")
        if stem == path or stem.endswith(f".{path}"):
            yield stem[: -len(path)].rstrip(".")


def tensor_at(checkpoint: Checkpoint, site: str, path: str) -> str | None:
    """Return the name of the matrix at a path from a module, if it is there."""
    for choice in path.split("|"):
        start = site
        while choice.startswith(".."):
            start, choice = start.rpartition(".")[0], choice[2:]
        base = f"{start}.{choice}".strip(".")
        for name in (f"{base}.weight", base):
            entry = checkpoint.entries.get(name)
            if entry is None or len(entry.shape) != 2 or not entry.numel:
                continue
            if entry.is_float:
                return name
    return None


def _made(checkpoint: Checkpoint, site: str, layout: Layout) -> AttentionLayout | None:
    paths = (
        (layout.qkv, layout.o)
        if isinstance(layout, Fused)
        else (layout.q, layout.kv, layout.o)
        if isinstance(layout, Paired)
        else (layout.q, layout.k, layout.v, layout.o)
    )
    names = [tensor_at(checkpoint, site, path) for path in paths]
    given = [name for name in names if name is not None]
    if len(given) < len(names):
        return None
    if isinstance(layout, Separate):
        return _separate(checkpoint, site, given)
    return _joined(checkpoint, site, given, layout)


def _separate(
    checkpoint: Checkpoint, site: str, names: list[str]
) -> AttentionLayout | None:
    q, k, v, o = (Map(tensor=name) for name in names)
    rows, keys = (checkpoint.entries[name].shape[0] for name in names[:2])
    heads = head_count(checkpoint, site, rows)
    kv_heads = None if heads is None else keys * heads // rows
    if heads is not None and (not kv_heads or heads % kv_heads or keys % kv_heads):
        heads = kv_heads = None
    return AttentionLayout(
        site=site, q=q, k=k, v=v, o=o, heads=heads, kv_heads=kv_heads
    )


def _joined(
    checkpoint: Checkpoint, site: str, names: list[str], layout: Fused | Paired
) -> AttentionLayout | None:
    """One matrix holds k and v, and q too if fused; o's inputs are all heads."""
    fused, out = checkpoint.entries[names[-2]], checkpoint.entries[names[-1]]
    # Conv1D stores a map as inputs × outputs; the joined side is the longer one.
    turned = fused.shape[0] < fused.shape[1]
    rows, inner = max(fused.shape), out.shape[0 if turned else 1]
    own = inner if isinstance(layout, Fused) else 0
    heads = head_count(checkpoint, site, inner)
    half = (rows - own) // 2
    if half < 1 or (rows - own) % 2:
        return None
    kv_heads = None
    if heads is not None:
        kv_heads = half * heads // inner if inner else 0
        if not kv_heads or heads % kv_heads:
            heads = kv_heads = None
    cuts = {
        letter: Map(tensor=names[-2], transposed=turned, rows=part)
        for letter, part in _parts(layout, (own, half), (heads, kv_heads)).items()
    }
    if len(cuts) < (3 if isinstance(layout, Fused) else 2):
        return None
    q = cuts.get("q") or Map(tensor=names[0], transposed=turned)
    o = Map(tensor=names[-1], transposed=turned)
    return AttentionLayout(
        site=site, q=q, k=cuts["k"], v=cuts["v"], o=o, heads=heads, kv_heads=kv_heads
    )


def _parts(
    layout: Fused | Paired,
    sizes: tuple[int, int],
    counts: tuple[int | None, int | None],
) -> dict[str, slice | Interleaved]:
    (own, half), (heads, kv_heads) = sizes, counts
    if isinstance(layout, Fused) and layout.interleaved:
        if heads is None or kv_heads is None:
            return {}
        each = heads // kv_heads
        return {letter: Interleaved(kv_heads, each, letter) for letter in "qkv"}
    found: dict[str, slice | Interleaved] = {
        "k": slice(own, own + half),
        "v": slice(own + half, own + 2 * half),
    }
    return {"q": slice(0, own), **found} if isinstance(layout, Fused) else found


def config_for(config: Mapping[str, Any], site: str) -> Mapping[str, Any]:
    """Return the part of a configuration that is about a module."""
    for part in ("text", "vision", "audio", "encoder", "decoder"):
        for key in (f"{part}_config", part):
            inner = config.get(key)
            if part in site and isinstance(inner, Mapping):
                return inner
    return config


def head_count(checkpoint: Checkpoint, site: str, rows: int) -> int | None:
    """Return a module's query heads: by its own count, the config's, or head width."""
    config = config_for(checkpoint.config, site)
    part = "decoder" if "decoder" in site else "encoder"
    given = [
        checkpoint.heads.get(site),
        config.get(f"{part}_attention_heads"),
        *(config.get(name) for name in HEAD_COUNTS),
    ]
    width = next((w for w in map(config.get, WIDTHS) if _is_count(w)), None)
    if width is not None and rows % width == 0:
        given.append(rows // width)
    found = next((h for h in given if _is_count(h)), None)
    return found if found and rows % found == 0 else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 100_000


def block_of(name: str) -> str:
    """Return the block a tensor is in: its name up to the first number.

    >>> block_of("encoder.layer.3.attention.self.query.weight"), block_of("wte.weight")
    ('encoder.layer.3', '')
    """
    found = LAYER.match(name)
    return found[1] if found else ""


def norm_epsilon(checkpoint: Checkpoint, name: str) -> float | None:
    """Return ε of a norm, from the model's configuration."""
    own = checkpoint.epsilons.get(name.rpartition(".")[0])
    config = config_for(checkpoint.config, name)
    given = [own, *(config.get(key) for key in EPSILONS)]
    return next((e for e in given if isinstance(e, float) and 0 < e < 1), None)


def is_norm_gain(name: str, entry: Entry) -> bool:
    """Say whether a tensor is γ of a norm, by its name and shape."""
    stem, _, last = name.rpartition(".")
    vector = len(entry.shape) == 1 and last in {"weight", "gamma", "scale"}
    return (
        vector and entry.is_float and bool(NORM.search(stem.rpartition(".")[2] or stem))
    )
