"""The kind of update that an optimiser makes of a gradient, by class and by group.

A step that follows the gradient, one of a sign, and one that is orthogonalised differ
in what their size means; a rule must know which it judges. One class may be several:
its groups say which they are (``kind`` in nanochat, ``use_muon`` in modded-nanogpt,
``algorithm`` in Dion).
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch.optim import Optimizer

UpdateKind = Literal["orthogonalised", "signed", "factored", "adaptive", "gradient", ""]
"""The last of an optimiser that is not known."""
_PARTS: tuple[tuple[str, UpdateKind], ...] = (
    ("adafactor", "factored"),
    ("came", "factored"),
    ("muon", "orthogonalised"),
    ("dion", "orthogonalised"),
    ("lion", "signed"),
    ("sign", "signed"),
    ("adam", "adaptive"),
    ("adagrad", "adaptive"),
    ("rmsprop", "adaptive"),
    ("sgd", "gradient"),
)
"""What a name holds → the kind; the first that fits counts."""


def update_kinds(optimizer: Optimizer) -> list[UpdateKind]:
    """Return the kind of update of each group of an optimiser."""
    return [update_kind(optimizer, group) for group in optimizer.param_groups]


def update_kind(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateKind:
    """Return the kind of update an optimiser makes in one of its groups."""
    for name in ("kind", "algorithm"):
        if isinstance(said := group.get(name), str) and (found := _kind_named(said)):
            return found
    marked = group.get("use_muon")
    if isinstance(marked, bool):
        return "orthogonalised" if marked else "adaptive"
    return _kind_named(type(optimizer).__name__)


def _kind_named(name: str) -> UpdateKind:
    """Return the kind that a name says."""
    parts = (kind for part, kind in _PARTS if part in name.lower())
    return next(parts, "")
