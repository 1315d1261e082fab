"""Call somebody's model on a batch in whatever form it comes, and find its output."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import InputError

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def output_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's main output: logits, else hidden states, else its first."""
    return _main(_called(model, batch))


def widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model in another dtype, in eval mode."""
    return copy.deepcopy(model).to(dtype).eval()


def batch_as(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in another dtype."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: batch_as(item, dtype) for key, item in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(batch_as(item, dtype) for item in batch)
    return batch


def _called(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _main(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            found: Tensor = getattr(output, name)
            return found
    items = output.values() if isinstance(output, Mapping) else output
    if isinstance(items, tuple | list) or isinstance(output, Mapping):
        for item in items:
            if isinstance(item, Tensor) and item.is_floating_point() and item.dim():
                return item
    raise InputError(
        f"the model returned {type(output).__name__} without a floating-point tensor; "
        "wrap it so that it returns the tensor whose error matters"
    )
