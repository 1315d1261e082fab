"""A Lipschitz bound with its claim (norm, scope, certainty), and norms of head weights.

Axes, in this file:  H head · D model width · E head width.

The published bounds know no biases. Reading every token as (x, 1) turns a biased
projection into a linear one, so each theorem applies as it stands to weights with one
more row and to tokens one longer: ‖(x, 1)‖² = ‖x‖² + 1. A bias on values needs nothing,
since attention weights sum to one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.lipschitz.heads import Heads

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


def with_bias(w_HDE: Tensor, b_HE: Tensor | None) -> Tensor:
    """Return W with the bias as one more row, if there is one."""
    return w_HDE if b_HE is None else torch.cat([w_HDE, b_HE[:, None]], 1)


def score_weights(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return W_Q and W_K of tokens (x, 1); both grow a row if either has a bias."""
    w_q, w_k, b_q, b_k = heads.w_q_HDE, heads.w_k_GDE, heads.b_q_HE, heads.b_k_GE
    if is_biased(heads):
        b_q = torch.zeros_like(w_q[:, 0]) if b_q is None else b_q
        b_k = torch.zeros_like(w_k[:, 0]) if b_k is None else b_k
    return with_bias(w_q, b_q), with_bias(w_k, b_k)


def is_biased(heads: Heads) -> bool:
    return heads.b_q_HE is not None or heads.b_k_GE is not None


def length(heads: Heads, radius: float) -> float:
    """Return the length of the longest token as the theorem sees it."""
    return math.hypot(radius, 1.0) if is_biased(heads) else radius


def wide(t: Tensor) -> Tensor:
    """Return the tensor in at least float32: sums of 16-bit products lose digits."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def spectral(w_HDE: Tensor) -> Tensor:
    """Return ‖W‖₂ of each head, from all its singular values; NaN if any is broken."""
    w_HDE = wide(w_HDE)
    # LAPACK raises on NaN, for the whole stack: keep the others' answers.
    sound_H = w_HDE.isfinite().all(-1).all(-1)
    whole_HDE = torch.where(sound_H[..., None, None], w_HDE, 0.0)
    norm_H: Tensor = torch.linalg.matrix_norm(whole_HDE, ord=2)
    return torch.where(sound_H, norm_H, torch.nan)


def mixing_norms(heads: Heads) -> Tensor:
    """Return ‖A_h‖₂, A = W_Q W_Kᵀ·scale/τ; ‖W_Q‖‖W_K‖·scale/τ if keys are rotated."""
    w_q_HDE, w_k_HDE = score_weights(heads)
    if heads.rotary is not None:
        return heads.slope * spectral(w_q_HDE) * spectral(w_k_HDE)
    r_q, r_k = (torch.linalg.qr(w, mode="r").R for w in (w_q_HDE, w_k_HDE))
    return heads.slope * spectral(r_q @ r_k.mT)


def check_covered(heads: Heads, author: str, *, rotary: bool = False) -> None:
    """Raise for what the theorem does not cover, naming what to use in its place."""
    normed = heads.q_norm is not None or heads.k_norm is not None
    if normed or (rotary and heads.rotary is not None):
        what = "QK-norm" if normed else "rotary positions"
        raise InputError(
            f"the bound of {author} is not stated for {what}; local_bound, joint_bound "
            "and block_bound cover it"
        )
