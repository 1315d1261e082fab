"""What one more sample does to a model's loss, at its weights and away from them.

Axes, in this file:  S sample · D direction of a subspace · N parameter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.auditing.curvature.objective import Call, Loss, Options, prepared
from equipoise.auditing.curvature.operator import Operator, gauss_newton, hessian
from equipoise.errors import InputError
from equipoise.numerics.hessian_products import unflattened
from equipoise.probes.logits import output_logits
from equipoise_lab.theory.loss_difference import delta_two, takeuchi

CHUNK = 64


@torch.no_grad()
def sample_losses(
    model: nn.Module,
    batch: Any,
    *,
    move: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
) -> Float[Tensor, "S"]:
    """Return ℓ_i of every sample, at the weights or moved away from them.

    Args:
        model, batch, loss: As for :func:`..curvature.hessian`; a loss
            of one's own is called sample by sample.
        move: What to add to some parameters, by name.

    Example:
        >>> model, x = nn.Linear(1, 1, bias=False), torch.ones(2, 1)
        >>> _ = nn.init.constant_(model.weight, 0.5)
        >>> sample_losses(model, (x, 2.5 * x))
        tensor([4., 4.])
    """
    size: Options = {"micro_batch": 1 if loss else CHUNK}
    model_copy, parts, _ = prepared(model, batch, size)
    values = {name: model_copy.parameters[name] + d for name, d in (move or {}).items()}
    return torch.cat(
        [_each(model_copy(values, p.args, p.kwargs), p, loss) for p in parts]
    )


def _each(output: Any, call: Call, loss: Loss | None) -> Tensor:
    if loss is not None:
        return loss(output, call.target).reshape(1)
    z, y = output_logits(output), call.target
    if z is None or not isinstance(y, Tensor):
        raise InputError("losses of single samples need logits and targets: pass loss=")
    if y.is_floating_point():
        return ((z - y) ** 2).flatten(1).mean(1)
    each = F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), reduction="none")
    return each.view(len(y), -1).mean(1)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """𝓛_{k+1} − 𝓛_k on a subspace, to second order: a + c·z + ½z·Bz."""

    value: float
    slope_D: Tensor
    bend_DD: Tensor

    def delta_two(self, sigma: float) -> float:
        """Return its mean square over normal z of standard deviation σ."""
        return delta_two(self.value, self.slope_D, self.bend_DD, sigma=sigma)


def difference_on(
    model: nn.Module,
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    *,
    basis_DN: Float[Tensor, "D N"],
) -> Quadratic:
    """Return how the mean of k samples changes with one more, on a subspace.

    Args:
        old, new: Inputs and targets of the k samples and of the next one.
        basis_DN: Orthonormal directions over all trainable parameters, such as the
            vectors of :func:`equipoise.auditing.curvature.eigenvalues`.
    """
    share = len(new[1]) / (len(old[1]) + len(new[1]))
    means = [float(sample_losses(model, part).mean()) for part in (old, new)]
    both = [_projected(hessian(model, part), basis_DN) for part in (old, new)]
    (old_c, old_B), (new_c, new_B) = both
    return Quadratic(
        share * (means[1] - means[0]), share * (new_c - old_c), share * (new_B - old_B)
    )


def _projected(operator: Operator, basis_DN: Tensor) -> tuple[Tensor, Tensor]:
    bent_DN = torch.stack([operator(u_N) for u_N in basis_DN])
    bend_DD = basis_DN @ bent_DN.mT
    return basis_DN @ operator.gradient(), (bend_DD + bend_DD.mT) / 2


def moved(model: nn.Module, v_N: Tensor) -> dict[str, Tensor]:
    """Return a vector over all trainable parameters as a move, by name."""
    model_copy = ModelCopy(model)
    chosen = [model_copy.parameters[name] for name in model_copy.trainable]
    return dict(zip(model_copy.trainable, unflattened(v_N, chosen), strict=True))


def excess_risk(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    samples: int,
    parameters: tuple[str, ...],
) -> float:
    """Return Takeuchi's tr(H⁻¹C)/(2k) over some parameters: what more data is worth.

    H is Gauss–Newton over the batch (positive semi-definite), C the covariance of the
    gradients of its samples. Dense: choose a block, such as the head. An asymptotic
    law; it assumes that the block is at its minimum.
    """
    block = gauss_newton(model, batch, parameters=parameters)
    slopes_SN = torch.stack(list(_gradients(model, batch, parameters)))
    return takeuchi(block.dense(), torch.cov(slopes_SN.mT), samples=samples)


def _gradients(
    model: nn.Module, batch: tuple[Tensor, Tensor], parameters: tuple[str, ...]
) -> Iterator[Tensor]:
    x, y = batch
    for i in range(len(y)):
        one = hessian(model, (x[i : i + 1], y[i : i + 1]), parameters=parameters)
        yield one.gradient()
