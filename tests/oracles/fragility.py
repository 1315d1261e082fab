"""Low-precision error by doing it: every stored tensor rounded, in float64.

Shares no formula with the predictors: it runs the head twice and subtracts.
"""

import torch
from torch import Tensor

from equipoise.numerics.formats import Format
from equipoise.numerics.rounding import rounded

Head = tuple[Tensor, Tensor, Tensor, Tensor]


def head(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, visible: Tensor | None = None
) -> Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v @ w


def rounded_head(
    parts: Head, format: Format, *, visible: Tensor | None = None
) -> Tensor:
    """Return the head's output with every stored tensor rounded."""
    q, k, v, w = (rounded(x.double(), format) for x in parts)
    s = rounded(q @ k.mT / q.shape[-1] ** 0.5, format)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    p = rounded(s.softmax(-1), format)
    a = rounded(p @ v, format)
    return rounded(a @ w, format)


def measured_head_error(
    parts: Head, format: Format, *, visible: Tensor | None = None
) -> Tensor:
    """Return ‖fl(O) - O‖_F / ‖O‖_F of each head."""
    q, k, v, w = (x.double() for x in parts)
    exact = head(q, k, v, w, visible)
    error = rounded_head(parts, format, visible=visible) - exact
    return error.norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def head_term(parts: Head, tensor: str, format: Format) -> Tensor:
    """Return Σ r(x)²‖∂O/∂x‖² over one stored tensor, by a dense autograd Jacobian."""
    q, k, v, w = (x.double() for x in parts)
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    a = s.softmax(-1) @ v
    ways = {
        "query": (q, lambda x: head(x, k, v, w)),
        "key": (k, lambda x: head(q, x, v, w)),
        "score": (s, lambda x: x.softmax(-1) @ v @ w),
        "value": (v, lambda x: head(q, k, x, w)),
        "mix": (a, lambda x: x @ w),
        "weight": (w, lambda x: a @ x),
    }
    x, onward = ways[tensor]
    jacobian = torch.func.jacrev(onward)(x)
    sensitivity = jacobian.square().flatten(0, 1).sum(0)
    return ((rounded(x, format) - x).square() * sensitivity).sum()
