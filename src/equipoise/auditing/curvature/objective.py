"""What is differentiated: a model, a batch in whatever form it comes, and a loss."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.anatomy.sites import unwrapped
from equipoise.auditing.subject import batch_as
from equipoise.errors import InputError
from equipoise.probes.logits import output_logits
from equipoise.probes.stored_batch import batch_length, cut

Loss = Callable[[Any, Any], Tensor]
"""(what the model returned, the targets) → a mean."""


class Options(TypedDict, total=False):
    """How a loss is differentiated: what every function of this package takes."""

    loss: Loss | None
    """(output, targets) → mean; by default the model's own ``.loss``, else
    cross-entropy, or MSE for real targets."""
    micro_batch: int | None
    """Samples at a time: memory is that of one such part."""
    dtype: torch.dtype | None
    """Of the products; that of the model by default, float32 at least."""


TARGETS = ("labels", "targets", "target", "label", "y")
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model, and its targets."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    weight: float
    """Its share of the full batch's mean."""


def calls(
    model: nn.Module, batch: Any, *, micro_batch: int | None = None
) -> tuple[Call, ...]:
    """Return a batch as calls of the model, cut along the first axis if asked.

    A pair is (inputs, targets); a mapping is keyword arguments, of which those that
    the model does not take and that are named like targets are the targets; a tensor
    of integers is tokens that predict each other. Weights make the parts' means add
    up to the mean of the batch: targets of −100 do not count.
    """
    args, kwargs, target = _understood(unwrapped(model), batch)
    pieces = [
        _cut(args, kwargs, target, piece)
        for piece in _slices(batch_length((args, kwargs)), micro_batch)
    ]
    sizes = [_counted(k, t) for _, k, t in pieces]
    total = sum(sizes)
    if total == 0:
        raise InputError("the batch has no target that counts (all are -100, or none)")
    return tuple(
        Call(args=a, kwargs=k, target=t, weight=size / total)
        for (a, k, t), size in zip(pieces, sizes, strict=True)
        if size
    )


def mean_loss(output: Any, target: Any) -> Tensor:
    """Return the model's own ``.loss``; else cross-entropy, or MSE for real targets.

    Without targets the model is a language model: each token predicts the next.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    z = output_logits(output)
    if z is None:
        raise InputError(
            f"no loss to differentiate: {type(output).__name__} holds neither a loss "
            "nor logits; use a model with a head, or one of your own around it that "
            "returns its loss (FILE.py:FUNCTION; in Python, loss= also does)"
        )
    if not isinstance(target, Tensor):
        raise InputError(
            "no loss to differentiate: the model returns none and the batch has no "
            "targets; add labels to the batch (in Python, also (inputs, targets))"
        )
    if target.is_floating_point():
        return F.mse_loss(z, target.to(z.dtype))
    flat, wanted = z.reshape(-1, z.shape[-1]), target.reshape(-1)
    if len(flat) != len(wanted):
        raise InputError(
            f"{len(flat)} rows of logits and {len(wanted)} targets: give one target "
            "for each row (in Python, loss= may compare them otherwise)"
        )
    return F.cross_entropy(flat, wanted, ignore_index=IGNORED)


def _understood(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], Any, Any]:
    if isinstance(batch, Mapping):
        return _from_mapping(model, dict(batch))
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return (), dict(inputs), target
        return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}, target
    if isinstance(batch, Tensor):
        return (batch,), {}, _next_tokens(batch)
    raise InputError(
        f"a batch is (inputs, targets), a mapping or a tensor, not {type(batch)}"
    )


def _from_mapping(
    model: nn.Module, batch: dict[str, Any]
) -> tuple[tuple[Any, ...], Any, Any]:
    accepted = inspect.signature(model.forward).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    target = None
    for name in TARGETS:
        if name in batch and name not in accepted:
            target = batch.pop(name)
    tokens = batch.get("input_ids", batch.get("tokens"))
    if target is None and "labels" in accepted and "labels" not in batch:
        target = None if tokens is None else _next_tokens(tokens)
    elif target is None and not any(name in batch for name in TARGETS):
        target = None if tokens is None else _next_tokens(tokens)
    unknown = [name for name in batch if name not in accepted and not free]
    if unknown and len(batch) == 1:
        return tuple(batch.values()), {}, target
    if unknown:
        raise InputError(
            f"the model takes no {', '.join(unknown)}: it takes {', '.join(accepted)}"
        )
    return (), batch, target


def _next_tokens(tokens: Tensor) -> Tensor | None:
    """Return each token's successor, and nothing for the last."""
    if tokens.is_floating_point() or tokens.ndim < 2:
        return None
    end = torch.full_like(tokens[..., :1], IGNORED)
    return torch.cat([tokens[..., 1:], end], -1)


def _slices(length: int, micro_batch: int | None) -> list[slice | None]:
    if micro_batch is None or micro_batch >= length:
        return [None]
    if micro_batch < 1:
        raise InputError(f"micro_batch {micro_batch}: at least one sample")
    starts = range(0, length, micro_batch)
    return [slice(at, min(at + micro_batch, length)) for at in starts]


def _cut(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, piece: slice | None
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    if piece is None:
        return args, kwargs, target
    length = batch_length((args, kwargs))
    a, k, t = cut((args, kwargs, target), piece, length=length)
    return a, k, t


def _counted(kwargs: Mapping[str, Any], target: Any) -> int:
    """Return over how many targets the mean of this part is."""
    if isinstance(target, Tensor):
        if target.is_floating_point():
            return target.numel()
        return int((target != IGNORED).sum())
    labels = kwargs.get("labels")
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        # A language model compares each position with the next label.
        return (
            int((labels[..., 1:] != IGNORED).sum()) if labels.ndim > 1 else len(labels)
        )
    return batch_length(kwargs)


def prepared(
    model: nn.Module, batch: Any, options: Options
) -> tuple[ModelCopy, tuple[Call, ...], Loss]:
    """Return a copy of the model, its calls in the copy's dtype, and the loss."""
    copied = ModelCopy(model, dtype=options.get("dtype"))
    wide = next(iter(copied.parameters.values())).dtype
    parts = calls(model, batch, micro_batch=options.get("micro_batch"))
    return copied, cast(parts, wide), options.get("loss") or mean_loss


def cast(calls: Sequence[Call], dtype: torch.dtype) -> tuple[Call, ...]:
    """Return the calls with floating-point inputs and targets in another dtype."""
    return tuple(
        replace(
            call,
            args=batch_as(call.args, dtype),
            kwargs=batch_as(call.kwargs, dtype),
            target=batch_as(call.target, dtype),
        )
        for call in calls
    )
