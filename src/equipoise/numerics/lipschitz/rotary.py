"""Rotary position embedding as a linear map per position, and its transpose.

Axes, in this file:  L position · E head width · R rotated channels · x leading axes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotate the first R channels of position l by angles given as cos and sin.

    The tables are used as they are: a scaled rotation (YaRN) stays scaled.
    """

    cos_LR: Tensor
    sin_LR: Tensor
    interleaved: bool = False
    """Pairs are neighbours (GPT-J); otherwise e pairs with e + R/2 (NeoX, HF)."""

    def __post_init__(self) -> None:
        if self.cos_LR.shape != self.sin_LR.shape or self.cos_LR.shape[-1] % 2:
            raise InputError(
                "rotary: cos and sin must share one shape (positions, even width); "
                f"got {tuple(self.cos_LR.shape)} and {tuple(self.sin_LR.shape)}"
            )

    def turned(self, u_xLE: Float[Tensor, "*x L E"], at_L: Tensor) -> Tensor:
        """Return R_l u for the vector at each position."""
        return self._map(u_xLE, at_L, transpose=False)

    def unturned(self, u_xLE: Float[Tensor, "*x L E"], at_L: Tensor) -> Tensor:
        """Return R_lᵀ u: what a change of the rotated vector means before rotation."""
        return self._map(u_xLE, at_L, transpose=True)

    def _map(self, u_xLE: Tensor, at_L: Tensor, *, transpose: bool) -> Tensor:
        cos_LR, sin_LR = (t[at_L].to(u_xLE) for t in (self.cos_LR, self.sin_LR))
        width = cos_LR.shape[-1]
        u_xLR, rest = u_xLE[..., :width], u_xLE[..., width:]
        if transpose:  # (diag(cos) + diag(sin) S)ᵀ = diag(cos) - S diag(sin)
            v_xLR = u_xLR * cos_LR - self._swap(u_xLR * sin_LR)
        else:
            v_xLR = u_xLR * cos_LR + self._swap(u_xLR) * sin_LR
        rest = rest.expand(*v_xLR.shape[:-1], rest.shape[-1])
        return torch.cat([v_xLR, rest], -1)

    def _swap(self, u_xR: Tensor) -> Tensor:
        """Return S u with Sᵀ = -S: each pair (a, b) becomes (-b, a)."""
        if self.interleaved:
            a, b = u_xR[..., ::2], u_xR[..., 1::2]
            return torch.stack([-b, a], -1).flatten(-2)
        a, b = u_xR.chunk(2, -1)
        return torch.cat([-b, a], -1)


def rotary(
    length: int, width: int, *, base: float = 1e4, interleaved: bool = False
) -> Rotary:
    """Return the usual tables: position l turns pair r by the angle l·base^(−2r/width).

    Example:
        >>> rotary(2, 4).cos_LR[0]
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    rate = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    rate = rate.repeat_interleave(2) if interleaved else rate.repeat(2)
    angle_LR = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return Rotary(cos_LR=angle_LR.cos(), sin_LR=angle_LR.sin(), interleaved=interleaved)
