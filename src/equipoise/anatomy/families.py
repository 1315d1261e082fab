"""How a family of models is declared: a short table per class, found by class name.

A declaration adds what interception cannot see: which weights are the projections, and
how a block is put together. Paths are relative to the module; ``..`` is its parent, and
``a|b`` is a where it exists and b otherwise. A declaration whose paths a module does
not have is not about that module.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from torch import nn

from equipoise.anatomy.sites import Placement
from equipoise.errors import InputError

log = logging.getLogger("equipoise")

GROUP = "equipoise.families"


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """Attention with four maps of their own: modules, or parameters."""

    q: str
    k: str
    v: str
    o: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Attention with one map for q, k and v: its rows are q, then k, then v."""

    qkv: str
    o: str
    interleaved: bool = False
    """True where the rows go group by group: a group's queries, its key, its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Attention with one map for k and v, k's rows first, and one of its own for q."""

    q: str
    kv: str
    o: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A station of the residual stream, and what is in it."""

    feedforward: tuple[str, ...]
    """One module, or its parts where the block holds them itself."""
    placement: Placement | Callable[[nn.Module], Placement] = ""
    """Where the norms stand; a function where the module itself says."""
    router: str = ""
    """Its output, or the first of its outputs, is the logits over experts."""


Layout = Separate | Fused | Paired
Declaration = Separate | Fused | Paired | Block

FAMILIES: dict[str, list[Declaration]] = {}


def family(*class_names: str) -> Callable[[Callable[[], Declaration]], None]:
    """Declare a family from outside; the latest declaration is tried first.

    Example:
        >>> @family("MyAttention")
        ... def mine():
        ...     return Separate(q="wq", k="wk", v="wv", o="wo")
        >>> FAMILIES.pop("MyAttention")[0].q
        'wq'
    """

    def declare(table: Callable[[], Declaration]) -> None:
        declaration = table()
        if not isinstance(declaration, Declaration):
            raise InputError(
                f"the family of {', '.join(class_names)} is {declaration!r}: return "
                f"one of Separate, Fused, Paired or Block. {advice(class_names[0])}"
            )
        for name in class_names:
            FAMILIES.setdefault(name, []).insert(0, declaration)

    return declare


def declared(class_name: str) -> list[Declaration]:
    """Return what is declared under a class name, installed packages included."""
    load_entry_points()
    return FAMILIES.get(class_name, [])


@cache
def load_entry_points() -> None:
    """Import what installed packages offer as ``equipoise.families``, once."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (ImportError, AttributeError) as failure:
            log.warning("equipoise: family %s is not loaded: %s", point.name, failure)


def advice(class_name: str) -> str:
    """Return how to declare a class nobody has declared, and what is known."""
    known = ", ".join(sorted(FAMILIES))
    return (
        f"To declare it write\n"
        f"    from equipoise.anatomy.families import Separate, family\n"
        f'    @family("{class_name}")\n'
        f'    def mine(): return Separate(q="…", k="…", v="…", o="…")\n'
        f"Known classes: {known}"
    )
