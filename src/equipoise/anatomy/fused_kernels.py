"""Attention kernels from outside torch, read from the arguments they are given.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
S sequence · T token of a pack.

flash-attn, xFormers and their like return no scores, but queries, keys, scale, mask
and window stand in their arguments; the scores are computed from these, as for torch's
own fused attention. A pack (``cu_seqlens``) holds documents that do not see each other:
it is laid out as a padded batch where that is not much larger, and otherwise read as
one sequence with a mask between documents. Lengths stay on the device: nothing here
waits for it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import ALL, AttentionCall, Modify, Where, is_masked
from equipoise.anatomy.operations import Function

Given = dict[str, Any]

# One name for what the kernels' schemas call differently.
SAME = {
    "q": ("query", "query_layer"),
    "k": ("key", "key_layer"),
    "v": ("value", "value_layer"),
    "scale": ("softmax_scale", "sm_scale"),
    "causal": ("is_causal",),
    "starts_q": ("cu_seqlens_q", "cu_seq_q"),
    "starts_k": ("cu_seqlens_k", "cu_seq_k", "cu_seqlens_kv"),
    "longest_q": ("max_seqlen_q", "max_q"),
    "longest_k": ("max_seqlen_k", "max_k", "max_seqlen_kv"),
    "left": ("window_size_left", "window_left"),
    "right": ("window_size_right", "window_right"),
    "sinks": ("s_aux", "learnable_sink"),
    "slopes": ("alibi_slopes",),
}
NAMES = {other: name for name, others in SAME.items() for other in others}
# Arguments that change which keys a query meets, in ways that are not read here.
REFUSED = {
    **dict.fromkeys(("block_table", "block_tables", "page_table"), "a paged cache"),
    **dict.fromkeys(("seqused_q", "seqused_k", "leftpad_k"), "a cache in part used"),
    **dict.fromkeys(("k_new", "kv_batch_idx", "rotary_cos"), "a cache that it extends"),
    **dict.fromkeys(("qv", "q_v"), "a second product with the values"),
    **dict.fromkeys(("score_mod", "mask_mod"), "a score function of its own"),
    "attention_chunk": "attention in chunks",
    **dict.fromkeys(("q_descale", "k_descale"), "queries or keys in 8 bits"),
}
# A pack's padded batch may be this many times as large as the pack.
MOST_PADDING = 4


class NotReadError(Exception):
    """A kernel was called in a way that is not read; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRows:
    """Which keys each query sees, and what is added to its scores."""

    causal: bool = False
    left: int = -1
    right: int = -1
    """How far a query sees; -1 is without end."""
    softcap: float = 0.0
    slopes_BH: Tensor | None = None
    """ALiBi: the scores fall by this much for each token of distance."""
    offset_S: Tensor | int = 0
    """Keys before the first query: masks are aligned at the last query and key."""
    document: tuple[Tensor, Tensor] | None = None
    """The document of each query and of each key, of a pack that is one sequence."""
    place: tuple[Tensor, Tensor] | None = None
    """The place of each query and key in its document, ends aligned, if they differ."""
    sinks_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but a causal mask from the upper left corner is needed."""
        square = isinstance(self.offset_S, int) and self.offset_S == 0
        window = self.left < 0 and (self.right < 0 or self.causal)
        extras = (self.slopes_BH, self.document, self.sinks_H)
        return (
            window
            and not self.softcap
            and all(x is None for x in extras)
            and (square or not self.causal)
        )

    def modify(self, scores_bhqK: Tensor, where: Where, i_q: Tensor) -> Tensor:
        """Return a block's scores as the kernel would see them, hidden keys at -inf."""
        tokens = scores_bhqK.shape[-1] - (self.sinks_H is not None)
        if self.softcap:  # padding is hidden already, and stays so
            capped = self.softcap * torch.tanh(scores_bhqK / self.softcap)
            scores_bhqK = capped.masked_fill(is_masked(scores_bhqK), -math.inf)
        ahead_SqK = self._ahead(tokens, where.sequences, i_q)
        seen_bhqK = scores_bhqK[..., :tokens]
        if self.slopes_BH is not None:
            slopes = self.slopes_BH.reshape(-1, self.slopes_BH.shape[-1], 1, 1)
            slopes = slopes[where.sequences if len(slopes) > 1 else ALL, where.heads]
            seen_bhqK = seen_bhqK - slopes * ahead_SqK.abs()
        seen_bhqK = seen_bhqK.masked_fill(self._hides(ahead_SqK, i_q), -math.inf)
        if self.sinks_H is None:
            return seen_bhqK
        sinks = self.sinks_H.to(seen_bhqK)[None, where.heads, None, None]
        return torch.cat((seen_bhqK, sinks.expand(*seen_bhqK.shape[:3], 1)), -1)

    def _ahead(self, tokens: int, sequences: slice, i_q: Tensor) -> Tensor:
        """Return how far each key is ahead of each query."""
        if self.place is not None:
            return self.place[1] - self.place[0][i_q][:, None]
        offset_S = self.offset_S
        if isinstance(offset_S, Tensor):
            offset_S = offset_S[sequences, None, None, None]
        return torch.arange(tokens, device=i_q.device) - i_q[:, None] - offset_S

    def seen_keys(
        self, shape: tuple[int, int, int, int], *, device: torch.device
    ) -> Tensor:
        """Return, int32 of (4, B or 1, Q), which keys each query sees by position.

        The first key and the one after the last, the query's own place among the keys,
        and the first key of its document.
        """
        _, _, Q, K = shape
        offset = self.offset_S
        offset_S1 = offset if isinstance(offset, int) else offset[:, None]
        own_SQ = torch.arange(Q, device=device)[None] + offset_S1
        first_SQ, end_SQ = torch.zeros_like(own_SQ), torch.full_like(own_SQ, K)
        if self.document is not None:
            first_SQ, end_SQ = (x.expand_as(own_SQ) for x in _ends(self.document))
        if self.place is not None:  # keys are counted from their document's first
            own_SQ = first_SQ + self.place[0]
        begin_SQ, right = first_SQ, 0 if self.causal else self.right
        if right >= 0:
            end_SQ = torch.minimum(end_SQ, own_SQ + right + 1)
        if self.left >= 0:
            begin_SQ = torch.maximum(begin_SQ, own_SQ - self.left)
        # With other keys than queries a sequence begins where the row does.
        first_SQ = first_SQ if Q == K else begin_SQ.clamp(min=0)
        return torch.stack((begin_SQ, end_SQ, own_SQ, first_SQ)).to(torch.int32)

    def by_place(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Return (B, K) where a key is seen, and (B, Q), a sequence's first key.

        None where a mask hides other keys than padding.
        """
        (B, H, Q, K), mask = call.shape, call.mask
        assert call.q_BHQD is not None
        real_BK = torch.ones(1, K, dtype=torch.bool, device=call.q_BHQD.device)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1):
                return None
            real_BK = mask[:, 0, 0]
        shape = (B, H, Q, K - call.extra_keys)
        sees_4SQ = self.seen_keys(shape, device=real_BK.device).long().clamp(0, K)
        seen_BK = _covered(sees_4SQ, K) & real_BK
        first_BQ = sees_4SQ[3].clamp(max=K - 1).expand(B, Q)
        first_BQ = _next_real(real_BK).expand(B, K).gather(1, first_BQ)
        return seen_BK.expand(B, K), first_BQ

    def _hides(self, ahead_SqK: Tensor, i_q: Tensor) -> Tensor:
        right = 0 if self.causal else self.right
        hides = ahead_SqK > (right if right >= 0 else math.inf)
        if self.left >= 0:
            hides = hides | (ahead_SqK < -self.left)
        if self.document is not None:
            of_query, of_key = self.document
            hides = hides | (of_query[i_q][:, None] != of_key[None, :])
        return hides


def _covered(sees_4SQ: Tensor, K: int) -> Tensor:
    """Return (S, K): which keys lie in the range of any query."""
    begin_SQ, end_SQ = sees_4SQ[0], sees_4SQ[1]
    some_SQ = (end_SQ > begin_SQ).int()
    change_SK = some_SQ.new_zeros(len(some_SQ), K + 1)
    change_SK.scatter_add_(1, begin_SQ, some_SQ).scatter_add_(1, end_SQ, -some_SQ)
    return change_SK.cumsum(1)[:, :K] > 0


def _next_real(real_BK: Tensor) -> Tensor:
    """Return the first real key from each key on; the last key where there is none."""
    last = real_BK.shape[1] - 1
    at_K = torch.arange(last + 1, device=real_BK.device)
    return at_K.where(real_BK, last).flip(1).cummin(1).values.flip(1)


def _ends(document: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return where each query's document begins and ends among the keys.

    Tokens after the last document have a negative number, and see none.
    """
    of_query, of_key = document
    last = len(of_key) + len(of_query) + 1
    rising = of_key.where(of_key >= 0, last).contiguous()
    wanted = of_query.where(of_query >= 0, last + 1).contiguous()
    return torch.searchsorted(rising, wanted), torch.searchsorted(
        rising, wanted, right=True
    )


def named_arguments(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Given:
    """Return arguments under one name each, whatever the kernel calls them."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {NAMES.get(name, name): value for name, value in given.items()}


def kernel_call(
    caller: Caller,
    given: Given,
    *,
    real_BK: Tensor | None = None,
    document_T: Tensor | None = None,
) -> AttentionCall:
    """Return the call that a flash-attention kernel was given: q of (B, S, H, D).

    ``real_BK`` says which keys are no padding, ``document_T`` to which document the
    tokens of a single sequence belong.

    Raises:
        NotReadError: If it was given something that changes the rows in another way.
    """
    if not {"q", "k", "v"} <= given.keys():
        raise NotReadError("has arguments of another version")
    _refuse(given)
    q, k, v = (given[name].detach() for name in "qkv")
    scale, rows = given.get("scale"), _rows(given)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if given.get("starts_q") is not None:
        return _pack(caller, (q, k, v), given, scale, rows)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    if document_T is not None:
        rows["document"] = (document_T, document_T)
    whole = KernelRows(offset_S=k.shape[1] - q.shape[1], **rows)
    mask = None if real_BK is None else real_BK[:, None, None, :]
    return make_call(caller, heads_first, scale, whole, mask)


def _rows(given: Given) -> Given:
    return {
        "causal": bool(given.get("causal")),
        **{side: _side(given, side) for side in ("left", "right")},
        "softcap": given.get("softcap") or 0.0,
        "slopes_BH": given.get("slopes"),
        "sinks_H": given.get("sinks"),
    }


def _refuse(given: Given) -> None:
    for name, reason in REFUSED.items():
        value = given.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotReadError(f"is called with {reason} ({name})")


def _side(given: Given, side: str) -> int:
    window = given.get("window_size")
    if window is not None and side not in given:
        return int(window[0 if side == "left" else 1])
    value = given.get(side)
    return -1 if value is None else int(value)


def make_call(
    caller: Caller,
    heads_first: list[Tensor],
    scale: float,
    rows: KernelRows,
    mask: Tensor | None = None,
) -> AttentionCall:
    """Return the call of queries, keys and values of (B, H, S, D)."""
    q_BHQD, k_BGKD, v_BGKD = heads_first
    if rows.sinks_H is not None:  # a key of zeros, whose score is the sink's
        k_BGKD = torch.cat((k_BGKD, k_BGKD.new_zeros(k_BGKD[:, :, :1].shape)), 2)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
    plain = rows.plain
    modify: Modify | None = None if plain else rows.modify
    return AttentionCall(
        module=caller.module,
        kind="kernel",
        q_BHQD=q_BHQD,
        k_BGKD=k_BGKD,
        v_BGKD=v_BGKD,
        mask=mask,
        causal=rows.causal and plain,
        scale=scale,
        modify=modify,
        by_place=None if plain else rows.by_place,
        cross=caller.cross,
        extra_keys=int(rows.sinks_H is not None),
        sinks=int(rows.sinks_H is not None),
    )


def _pack(
    caller: Caller,
    packed: tuple[Tensor, Tensor, Tensor],
    given: Given,
    scale: float,
    rows: Given,
) -> AttentionCall:
    """Return the call of a pack: (T, H, D), documents from ``starts`` on."""
    q_THD, k_TGD, v_TGD = packed
    starts_q, starts_k = given["starts_q"], given.get("starts_k")
    if starts_k is None or _same(starts_q, starts_k):
        starts_k = starts_q
    documents = len(starts_q) - 1
    longest = [int(given.get(f"longest_{x}") or len(q_THD)) for x in "qk"]
    if documents * max(longest) > MOST_PADDING * len(q_THD):
        return _one_sequence(caller, packed, (starts_q, starts_k), scale, rows)
    q_SHQD, real_SQ = _padded(q_THD, starts_q, longest[0])
    k_SGKD, real_SK = _padded(k_TGD, starts_k, longest[1])
    v_SGKD, _ = _padded(v_TGD, starts_k, longest[1])
    offset_S = 0 if starts_k is starts_q else starts_k.diff() - starts_q.diff()
    mask = real_SK[:, None, None, :]
    if starts_k is not starts_q:  # else a token that is no key is no query
        mask = mask & real_SQ[:, None, :, None]
    whole = KernelRows(offset_S=offset_S, **rows)
    return make_call(caller, [q_SHQD, k_SGKD, v_SGKD], scale, whole, mask)


def _padded(x_THD: Tensor, starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return (S, H, longest, D), and (S, longest), True where a token is real."""
    at_L = torch.arange(longest, device=x_THD.device)
    real_SL = at_L < starts.diff()[:, None]
    place_SL = (starts[:-1, None] + at_L).clamp(max=len(x_THD) - 1)
    x_SLHD = x_THD[place_SL.long()]
    return x_SLHD.transpose(1, 2), real_SL


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are one, without reading them."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape)


def _one_sequence(
    caller: Caller,
    packed: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    scale: float,
    rows: Given,
) -> AttentionCall:
    """Return the call as one sequence in which documents are hidden from each other."""
    document = tuple(
        torch.searchsorted(s, torch.arange(len(x), device=x.device), right=True) - 1
        for s, x in zip(starts, packed, strict=False)
    )
    place = None
    if starts[0] is not starts[1]:
        longer = (starts[1].diff() - starts[0].diff(), 0 * starts[1].diff())
        place = tuple(
            torch.arange(len(d), device=d.device)
            - (s[:-1] - more)[d.clamp(max=-2 + len(s))]
            for d, s, more in zip(document, starts, longer, strict=True)
        )
    # Tokens after the last document belong to none, and see none.
    known = [
        d.where(d < len(s) - 1, -1 - n)
        for n, (d, s) in enumerate(zip(document, starts, strict=True))
    ]
    heads_first = [x.transpose(0, 1)[None] for x in packed]
    whole = KernelRows(
        document=(known[0], known[1]),
        place=None if place is None else (place[0], place[1]),
        **rows,
    )
    return make_call(caller, heads_first, scale, whole)


# Operators by name: all have arguments that ``kernel_call`` knows.
OPERATORS = {
    *("flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward"),
    *("flash_attn_3._flash_attn_forward", "flash_attn_3.fwd"),
    *("xformers_flash.flash_fwd", "mslk_flash.flash_fwd", "torch_attn._varlen_attn"),
}


def is_known(func: Function) -> bool:
    """Return whether an operator's arguments can be read."""
    return str(func).removesuffix(".default") in OPERATORS


def operator_arguments(
    func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Given:
    """Return an operator's arguments by name, as its own schema names them."""
    overload: Any = getattr(func, "default", func)
    names = tuple(argument.name for argument in overload._schema.arguments)
    return named_arguments(names, args, kwargs)
