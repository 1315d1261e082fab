"""Readings of several blocks, sizes or draws become one, field by field."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

Readings = TypeVar("Readings")
How = Callable[[list[Tensor]], Tensor]


def joined(parts: Sequence[Readings], how: How) -> Readings:
    """Return the parts' tensors put together by ``how``; a part left out stays None.

    Example:
        >>> import torch
        >>> joined([(torch.ones(1), None), (torch.zeros(2), None)], torch.cat)
        (tensor([1., 0., 0.]), None)
    """
    whole: Readings = _joined(parts, how)
    return whole


def _joined(parts: Sequence[Any], how: How) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return how(list(parts))
    if isinstance(first, tuple):
        columns = [_joined(column, how) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    names = [field.name for field in fields(first)]
    return type(first)(
        **{n: _joined([getattr(part, n) for part in parts], how) for n in names}
    )
