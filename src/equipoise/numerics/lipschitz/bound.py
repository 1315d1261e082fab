"""What a bound claims: how much, in which norm, where it holds, and how surely."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from equipoise.errors import InputError

Scope = Literal["local", "ball", "global"]
Kind = Literal["certified", "first order", "estimate"]
Norm = Literal["block-inf", "frobenius"]

# From the strongest claim to the weakest: a combination claims no more than its parts.
_SCOPES: tuple[Scope, ...] = ("global", "ball", "local")
_KINDS: tuple[Kind, ...] = ("certified", "first order", "estimate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper bound on a Lipschitz constant, with the claim it makes."""

    value: float
    scope: Scope
    """``local``: at the given input; ``ball``: wherever every token is at most as long
    as stated in ``note``; ``global``: everywhere."""
    kind: Kind
    """``certified``: bounds finite changes inside the scope. ``first order``: bounds
    the derivative at the given input, so only infinitesimal changes. ``estimate``:
    some part was not bounded (a sample, an iteration without a certificate)."""
    norm: Norm = "block-inf"
    """``block-inf``: the largest token, each measured in ℓ2 (Emadi's ∞/RMS geometry).
    ``frobenius``: ℓ2 over all tokens and channels at once."""
    note: str = ""

    @property
    def log(self) -> float:
        """Return the natural logarithm of the bound; −inf for a constant map."""
        return math.log(self.value) if self.value != 0 else -math.inf


def combined(value: float, parts: Iterable[Bound], *, note: str = "") -> Bound:
    """Return a bound of the given value whose claim is the weakest among its parts.

    Example:
        >>> a = Bound(value=2.0, scope="global", kind="certified")
        >>> b = Bound(value=3.0, scope="local", kind="first order")
        >>> combined(a.value * b.value, [a, b]).scope
        'local'
    """
    parts = list(parts)
    norms = {part.norm for part in parts}
    if len(norms) != 1:
        raise InputError(f"bounds in different norms do not combine: {sorted(norms)}")
    return Bound(
        value=value,
        scope=max((part.scope for part in parts), key=_SCOPES.index),
        kind=max((part.kind for part in parts), key=_KINDS.index),
        norm=norms.pop(),
        note=note,
    )
