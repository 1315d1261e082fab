"""A stored batch of the training, with the loss it was trained by.

Axes, in this file:  R row of logits · V class.

A loop computes its loss where we cannot see it. For cross-entropy the gradient at the
logits says enough: g_R = c_R·(softmax(z)_R − e_y), so y is where g is negative and
c_R is the weight of the row; label smoothing or any other loss does not fit, and is not
mistaken for one that does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.probes.logits import output_logits

# bfloat16 logits carry 3 digits; a loss of another kind misses by the order of one.
FITS = 0.05


class CrossEntropy(NamedTuple):
    """What a loss made of logits, row by row: Σ weight·CE(z, target)."""

    target_R: Tensor
    weight_R: Tensor


def recover_cross_entropy(z: Tensor, g: Tensor) -> CrossEntropy | None:
    """Return the cross-entropy whose gradient at z is g, if there is one.

    Example:
        >>> z = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
        >>> F.cross_entropy(z, torch.tensor([1, 0])).backward()
        >>> recover_cross_entropy(z.detach(), z.grad)
        CrossEntropy(target_R=tensor([1, 0]), weight_R=tensor([0.5000, 0.5000]))
    """
    z_RV, g_RV = (t.detach().float().reshape(-1, t.shape[-1]) for t in (z, g))
    target_R = g_RV.argmin(-1)
    shape_RV = z_RV.softmax(-1)
    shape_RV.scatter_add_(
        1, target_R[:, None], torch.full_like(target_R[:, None], -1).float()
    )
    size_R = (shape_RV**2).sum(-1)
    weight_R = (shape_RV * g_RV).sum(-1) / size_R.clamp(min=1e-20)
    left = torch.linalg.vector_norm(g_RV - weight_R[:, None] * shape_RV)
    fits = left <= FITS * torch.linalg.vector_norm(g_RV)
    if not bool(fits) or not bool((weight_R >= 0).all()) or not bool(weight_R.any()):
        return None
    return CrossEntropy(target_R, weight_R)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Arguments of one call, and the mean loss they were trained with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entropy: CrossEntropy | None
    """None where the model returns a loss of its own."""

    def loss(self, output: Any) -> Tensor:
        """Return the loss of a model's output for this batch."""
        if self.entropy is None:
            own: Tensor = output.loss
            return own
        z = output_logits(output)
        assert z is not None
        each_R = F.cross_entropy(
            z.reshape(-1, z.shape[-1]), self.entropy.target_R, reduction="none"
        )
        return (self.entropy.weight_R.to(each_R) * each_R).sum()


def store_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    entropy: CrossEntropy | None,
    *,
    at_most: int,
) -> StoredBatch:
    """Return a copy of a call's first samples, with the weights of a mean loss.

    Weights that are all 1 belong to a sum and stay; others are scaled to sum to 1, so
    that neither gradient accumulation nor a GradScaler changes the curvature.
    """
    length = batch_length((args, kwargs))
    piece = slice(0, min(length, at_most))
    copied = cut((args, dict(kwargs)), piece, length=length)
    if entropy is not None:
        rows = len(entropy.target_R) // length * (piece.stop or 1)
        chosen = CrossEntropy(entropy.target_R[:rows], entropy.weight_R[:rows])
        entropy = chosen._replace(
            weight_R=_normalised(entropy.weight_R, chosen.weight_R)
        )
    return StoredBatch(copied[0], copied[1], entropy)


def _normalised(all_R: Tensor, chosen_R: Tensor) -> Tensor:
    used_R = all_R[all_R > 0]
    if len(used_R) > 1 and bool((used_R - 1).abs().max() < 1e-2):
        return chosen_R * (all_R.sum() / chosen_R.sum())
    return chosen_R / chosen_R.sum()


def batch_length(x: Any) -> int:
    """Return the length of the first axis of the first tensor; 1 if there is none."""
    tensors = tensors_of(x)
    return len(tensors[0]) if tensors and tensors[0].ndim else 1


def tensors_of(x: Any) -> list[Tensor]:
    """Return the tensors in whatever holds them, in order."""
    if isinstance(x, Tensor):
        return [x]
    items = x.values() if isinstance(x, Mapping) else x
    if isinstance(x, Mapping | tuple | list):
        return [tensor for item in items for tensor in tensors_of(item)]
    return []


def cut(x: Any, piece: slice, *, length: int) -> Any:
    """Return copies of some samples, of every tensor that has ``length`` of them."""
    if isinstance(x, Tensor):
        return (x[piece] if x.ndim and len(x) == length else x).detach().clone()
    if isinstance(x, Mapping):
        return {key: cut(item, piece, length=length) for key, item in x.items()}
    if isinstance(x, tuple | list):
        return tuple(cut(item, piece, length=length) for item in x)
    return x
