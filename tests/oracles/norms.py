"""LayerNorm and RMSNorm by autograd: torch's own layers, differentiated densely."""

import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn import functional as F


def layer_norm_jacobian(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    def forward(x_D: Tensor) -> Tensor:
        return F.layer_norm(x_D, x_D.shape, weight_D.double(), None, eps)

    J_DD: Tensor = jacrev(forward)(x_D.double())
    return J_DD


def rms_norm_jacobian(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    def forward(x_D: Tensor) -> Tensor:
        return F.rms_norm(x_D, x_D.shape, weight_D.double(), eps)

    J_DD: Tensor = jacrev(forward)(x_D.double())
    return J_DD


def spectral(J_DD: Tensor) -> float:
    return float(torch.linalg.matrix_norm(J_DD, ord=2))
