"""Where a token stands: sinusoids to add, or rotations of queries and keys.

Axes, in this file:  B batch · H head · T token · C channel · D head channel · F pair.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def angles(T: int, pairs: int, device: torch.device | None = None) -> Tensor:
    """Return t·10000^(-f/pairs): the phase of pair f at token t, in float32."""
    t_T = torch.arange(T, device=device, dtype=torch.float32)
    f_F = torch.arange(pairs, device=device, dtype=torch.float32)
    return t_T[:, None] * 10000 ** (-f_F / pairs)


def sinusoidal(T: int, width: int) -> Float[Tensor, "T C"]:
    """Return sines in even channels and cosines in odd ones.

    >>> sinusoidal(1, 4)
    tensor([[0., 1., 0., 1.]])
    """
    a_TF = angles(T, (width + 1) // 2)
    return torch.stack([a_TF.sin(), a_TF.cos()], -1).flatten(1)[:, :width]


def rotated(x_BHTD: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Return x with each pair of channels turned by its phase; norms stay."""
    T, D = x_BHTD.shape[-2:]
    a_TF = angles(T, D // 2, x_BHTD.device)
    cos_TF, sin_TF = a_TF.cos().to(x_BHTD.dtype), a_TF.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.reshape(*x_BHTD.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([a * cos_TF - b * sin_TF, a * sin_TF + b * cos_TF], -1)
    return turned.flatten(-2)
