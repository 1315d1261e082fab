"""Attention over sentences of different lengths, kept without padding.

Axes, in this file:  B batch · H head · Q query · K key · D width · L longest.
A nested tensor is taken apart and padded here, because nothing else of ours knows it;
its lengths live on the host, so an accelerator is waited for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NAMES = ("query", "key", "value", "attn_mask")


def is_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether an attention call was given sentences without padding."""
    given = (*args, *kwargs.values())
    return any(isinstance(x, Tensor) and x.is_nested for x in given)


def padded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call's arguments as they would be with padding and a mask.

    Padding is hidden as a key, and as a query sees nothing.
    """
    rest = ("dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip((*NAMES, *rest), args, strict=False)), **kwargs}
    query_BHQD, real_BQ = _padded(given["query"])
    key_BHKD, real_BK = _padded(given["key"])
    value_BHKD, _ = _padded(given["value"])
    mask = real_BQ[:, None, :, None] & real_BK[:, None, None, :]
    whole = {"query": query_BHQD, "key": key_BHKD, "value": value_BHKD}
    return {**given, **whole, "attn_mask": mask}


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, H, L, D) with zeros at the ends, and (B, L), True where it is real."""
    parts = [part.detach() for part in x.unbind()]
    lengths = [part.shape[-2] for part in parts]
    longest = max(lengths)
    whole = torch.stack(
        [F.pad(part, (0, 0, 0, longest - part.shape[-2])) for part in parts]
    )
    at_L = torch.arange(longest, device=whole.device)
    return whole, at_L[None] < torch.tensor(lengths, device=whole.device)[:, None]
