"""How far a row can move: every vertex of the ball of logits, through softmax."""

import torch
from torch import Tensor


def largest_change(z_NK: Tensor, radius: float) -> Tensor:
    """Return max over Δ = ±r of ‖softmax(z + Δ) − softmax(z)‖₁, for K ≤ 12 or so."""
    K = z_NK.shape[1]
    signs_Ks = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * K).view(-1, K)
    after_NsK = (z_NK[:, None] + radius * signs_Ks.double()).softmax(-1)
    change_N: Tensor = (after_NsK - z_NK.softmax(-1)[:, None]).abs().sum(-1).amax(-1)
    return change_N
