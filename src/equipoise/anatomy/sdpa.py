"""torch's fused attention: read from its arguments, or run in plain operations.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
L longest · N rows of a folded batch.

A model may call ``scaled_dot_product_attention`` with any axes; ``four`` lays them out
as (batch, head, query, key). A nested tensor (sentences of different lengths without
padding) is taken apart and padded here, because nothing else of ours knows it; its
lengths live on the host, so an accelerator is waited for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall, future_QK, masked_scores
from equipoise.anatomy.head_counts import HEAD_COUNTS, count
from equipoise.anatomy.operations import FUSED, Function

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


def four(x: Tensor, heads: int | None) -> Tensor:
    """Return x of any rank as (B, H, Q, K), its last two axes kept.

    ``heads`` is how many the calling module has, where it says so: it tells a batch
    folded with the heads, (B·H, Q, K), from a batch of single heads.

    Example:
        >>> import torch
        >>> [tuple(four(torch.zeros(s), 4).shape) for s in ((8, 5, 6), (2, 2, 2, 5, 6))]
        [(2, 4, 5, 6), (2, 4, 5, 6)]
        >>> tuple(four(torch.zeros(8, 5, 6), None).shape)
        (8, 1, 5, 6)
        >>> tuple(four(torch.zeros(2, 4, 3, 5, 6), 4).shape)  # three blocks of queries
        (6, 4, 5, 6)
    """
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        folded = heads is not None and heads > 1 and x.shape[0] % heads == 0
        return x.unflatten(0, (-1, heads)) if folded and heads else x.unsqueeze(1)
    if x.ndim == 4:
        return x
    return _grouped(x, heads)


def _grouped(x: Tensor, heads: int | None) -> Tensor:
    """Fold the middle axes into heads, or, if one of them is heads, into batch."""
    grouped = x.shape[1:-2].numel()
    if heads is None or heads == grouped or heads not in (x.shape[-3], x.shape[1]):
        return x.flatten(1, -3)
    heads_last = x if heads == x.shape[-3] else x.movedim(1, -3)
    return heads_last.flatten(0, -4)


@dataclass(frozen=True, slots=True)
class FusedArguments:
    """The arguments of ``scaled_dot_product_attention``, in torch's order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def scaling(self) -> float:
        """What q·k is multiplied by: 1/√d_h unless given."""
        width = self.query.shape[-1]
        return 1 / math.sqrt(width) if self.scale is None else self.scale


def sdpa_call(caller: Caller, given: FusedArguments) -> AttentionCall:
    """Return the call that these arguments make."""
    heads, query = count(caller.module, HEAD_COUNTS), given.query
    k_BGKD, v_BGKD = (_like(x, query, four(x, heads)) for x in (given.key, given.value))
    return AttentionCall(
        module=caller.module,
        kind="sdpa",
        q_BHQD=four(query, heads),
        k_BGKD=k_BGKD,
        v_BGKD=v_BGKD,
        mask=_mask(given.attn_mask, query, heads),
        causal=given.is_causal,
        scale=given.scaling,
        cross=caller.cross,
    )


def _like(x: Tensor, query: Tensor, x_BGKD: Tensor) -> Tensor:
    """Return keys with the queries' batch: a batch of one serves all."""
    return (
        x_BGKD.expand(four(query, None).shape[0], -1, -1, -1) if x.ndim == 4 else x_BGKD
    )


def _mask(mask: Tensor | None, query: Tensor, heads: int | None) -> Tensor | None:
    """Return the mask with the axes that the queries were given."""
    if mask is None or mask.ndim <= 2 or query.ndim == 4:
        return mask
    return four(mask.expand(*query.shape[:-2], -1, -1), heads)


def _softmax(z_HQK: Tensor) -> Tensor:
    return torch.softmax(z_HQK, -1)


@dataclass(frozen=True)
class WrittenOut:
    """Fused attention as three steps that may be observed, or replaced.

    ``Mix(dropout(weigh(mask(scores(scale · q, kᵀ)))), v)``: what the fused function
    computes, with its scores in memory. A row that sees no key is left to ``weigh``.

    >>> q = k = v = torch.eye(2)[None]
    >>> attention = WrittenOut(weigh=lambda z: (z > 0).to(z.dtype))
    >>> attention(q, k, v).tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """

    scores: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    weigh: Callable[[Tensor], Tensor] = _softmax
    mix: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mixed values; the parameters are torch's own."""
        given = FusedArguments(*args, **kwargs)
        query, key, value = given.query, given.key, given.value
        if given.enable_gqa:
            copies = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(copies, -3) for x in (key, value))
        z_HQK = self.scores(query * given.scaling, key.mT)
        if given.is_causal:
            future = future_QK(
                slice(0, z_HQK.shape[-2]), key.shape[-2], device=key.device
            )
            z_HQK = z_HQK.masked_fill(future, -math.inf)
        if given.attn_mask is not None:
            z_HQK = masked_scores(z_HQK, given.attn_mask)
        a_HQK = self.weigh(z_HQK)
        # Without dropout the call is left out: it would be one more operation seen.
        if given.dropout_p:
            a_HQK = F.dropout(a_HQK, given.dropout_p)
        return self.mix(a_HQK, value)


class OpenAttention(TorchFunctionMode):
    """A mode that meets attention as plain operations, whichever function is called.

    ``scaled_dot_product_attention`` becomes ``attention``; what happens inside
    ``F.multi_head_attention_forward``, which no mode can see, comes past as calls of
    its own; every other call goes to ``call``.
    """

    attention: WrittenOut

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUSED:
            return self.attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # inside a mode's own function the mode is off
                return open_multi_head()(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a call returns."""
        raise NotImplementedError


def open_multi_head(**names: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return torch's own Python function, with other functions under some names in it.

    A copy: torch's function asks whether a mode is active and would call it endlessly,
    and its module must not be changed for others.
    """
    function: Any = F.multi_head_attention_forward
    bound = {
        **function.__globals__,
        "has_torch_function": lambda tensors: False,
        **names,
    }
    return FunctionType(function.__code__, bound, argdefs=function.__defaults__)
