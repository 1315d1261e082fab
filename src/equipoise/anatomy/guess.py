"""What an undeclared model probably is, by the names people give these things."""

from collections.abc import Iterable

from torch import nn

from equipoise.anatomy.families import Fused, Layout, Separate

QUERIES = (
    "q_proj",
    "query",
    "q_lin",
    "wq",
    "to_q",
    "q",
    "w_q",
    "query_proj",
    "linear_q",
)
FUSED = ("c_attn", "qkv", "Wqkv", "query_key_value", "qkv_proj", "to_qkv", "in_proj")
OUTPUTS = (
    *("o_proj", "out_proj", "c_proj", "out_lin", "wo", "proj", "to_out", "dense"),
    *("o", "w_o", "out", "linear_out", "output"),
)


def layout(module: nn.Module) -> Layout | None:
    """Return the projections a module seems to have, or None if none are so named."""
    children = dict(module.named_children())
    o = _first(OUTPUTS, children)
    fused, q = _first(FUSED, children), _first(QUERIES, children)
    if o is None or (fused is None and q is None):
        return None
    transposed = type(children[o]).__name__ == "Conv1D"
    if fused is not None:
        return Fused(qkv=fused, o=o, transposed=transposed)
    assert q is not None
    k, v = _sibling(q, "k"), _sibling(q, "v")
    if k not in children or v not in children:
        return None
    return Separate(q=q, k=k, v=v, o=o, transposed=transposed)


def blocks(named: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return the longest list of like modules: the stations of the residual stream."""
    stacks: list[dict[str, nn.Module]] = []
    for name, module in named:
        children = dict(module.named_children())
        alike = len({type(child) for child in children.values()}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike:
            stacks.append({f"{name}.{n}".lstrip("."): c for n, c in children.items()})
    return max(stacks, key=len, default={})


def _first(names: Iterable[str], children: dict[str, nn.Module]) -> str | None:
    return next((name for name in names if name in children), None)


def _sibling(query: str, letter: str) -> str:
    """Return the key's or value's name that goes with a query's name."""
    words = {"query": {"k": "key", "v": "value"}}
    for word, other in words.items():
        if word in query:
            return query.replace(word, other[letter])
    return query.replace("q", letter)
