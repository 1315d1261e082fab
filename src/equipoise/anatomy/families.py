"""Known attention classes: a short table each, found by class name, importing nothing.

A declaration adds what interception cannot see: which weights are the projections.
Paths are relative to the module that calls attention; ``..`` is its parent.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """Four linear maps of their own."""

    q: str
    k: str
    v: str
    o: str
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """One map for q, k and v: its output rows are q, then k, then v."""

    qkv: str
    o: str
    transposed: bool = False
    interleaved: bool = False
    """True where the rows go head by head, each with its own q, k and v."""


Layout = Separate | Fused

LLAMA = Separate(q="q_proj", k="k_proj", v="v_proj", o="o_proj")

FAMILIES: dict[str, Layout] = {
    "GPT2Attention": Fused(qkv="c_attn", o="c_proj", transposed=True),
    "LlamaAttention": LLAMA,
}


def family(*class_names: str) -> Callable[[Callable[[], Layout]], None]:
    """Declare a family from outside.

    Example:
        >>> @family("MyAttention")
        ... def mine():
        ...     return Separate(q="wq", k="wk", v="wv", o="wo")
        >>> FAMILIES.pop("MyAttention").q
        'wq'
    """

    def declare(layout: Callable[[], Layout]) -> None:
        FAMILIES.update(dict.fromkeys(class_names, layout()))

    return declare
