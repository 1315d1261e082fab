"""x·Wᵀ + b whose backward pass leaves out features that carry no gradient.

Axes, in this file: N tokens · K input features · M output features · m live ones.

A probe on some of a vocabulary's logits leaves most columns of the head's gradient
zero; the product back to the hidden states then costs m/M of the dense one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WIDE = 4096
"""Output features beyond which looking for silent ones pays."""

Heard = Callable[[Tensor, Tensor, Tensor], None]
"""Told (gradient of the live features, their indices, their rows of W)."""


def sparse_product(
    x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, *, heard: Heard
) -> Tensor:
    """Return x·Wᵀ + b; when a gradient comes, tell ``heard`` and send it to x only."""
    y: Tensor = _Product.apply(x, weight_MK, bias_M, heard)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, heard: Heard
    ) -> Tensor:
        ctx.save_for_backward(weight_MK)
        ctx.heard = heard
        # No view of a flat product: the model may go on in place.
        y = x.new_empty((*x.shape[:-1], len(weight_MK)))
        y_NM, x_NK = y.view(-1, len(weight_MK)), x.reshape(-1, x.shape[-1])
        torch.mm(x_NK, weight_MK.mT, out=y_NM)
        return y if bias_M is None else y.add_(bias_M)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (weight_MK,) = ctx.saved_tensors
        live_m = _live(g.flatten(0, -2))
        g_xm, weight_mK = g, weight_MK
        if len(live_m) < g.shape[-1]:
            g_xm = g.index_select(-1, live_m)
            weight_mK = weight_MK.index_select(0, live_m)
        ctx.heard(g_xm, live_m, weight_mK)
        return g_xm @ weight_mK, None, None, None


def _live(g_NM: Tensor) -> Tensor:
    """Return the features that carry the gradient; all of them when in doubt.

    Those of the largest row are a guess; they are all when they hold the whole norm.
    """
    every = torch.arange(g_NM.shape[1], device=g_NM.device)
    norm_N = torch.linalg.vector_norm(g_NM, dim=1)
    guess_m = (g_NM[int(norm_N.argmax())] != 0).nonzero().squeeze(1)
    if 2 * len(guess_m) > len(every):
        return every
    held = float(g_NM.index_select(1, guess_m).double().square().sum())
    whole = float(norm_N.double().square().sum())
    return guess_m if abs(held - whole) <= 1e-6 * whole else every
