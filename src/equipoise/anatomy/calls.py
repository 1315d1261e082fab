"""One attention call: its queries, keys and mask, and its scores read again in blocks.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
b, h, g, q, k the part of one block or piece.

A score is masked when it is at most ``MASKED``. Models mask with -inf, the lowest
number of a dtype, -1e9, or (BERT's first code, and fp16 models) -1e4 plus the score,
which may be a thousand; no score of a visible key is that low, and exp of it is 0 in
every format. Only scores and the masks added to them are judged so: an activation of
-1e4 is a number like any other.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MASKED = -9e3
OTHER_WEIGHTS = "weights"
"""Kind of a call whose weights are no softmax: its scores are their logarithms, so that
a row's softmax is each weight's share of the row."""


def is_masked(score: Tensor) -> Tensor:
    """Return where scores, or an additive mask, hide a key; NaN hides none.

    >>> is_masked(torch.tensor([0.0, -1e4 + 900, -1e9, -torch.inf, torch.nan])).tolist()
    [False, True, True, True, False]
    """
    return score <= MASKED


def masks_some(x: Tensor | float) -> bool:
    """Return whether a constant that is added to scores would hide a key."""
    if isinstance(x, Tensor):
        return bool(x.is_floating_point() and x.numel() and is_masked(x.min()))
    return x <= MASKED


def masked_to_infinity(score: Tensor) -> Tensor:
    """Return scores with -inf for every key that is masked."""
    return score.masked_fill(is_masked(score), -math.inf)


def future_QK(queries: slice, keys: int, *, device: torch.device) -> Tensor:
    """Return where key > query, counted from the upper left corner as torch does."""
    i_Q = torch.arange(queries.start, queries.stop, device=device)
    j_K = torch.arange(keys, device=device)
    return j_K[None, :] > i_Q[:, None]


def additive(hides: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an additive mask from ``nn.MultiheadAttention``'s kind: True hides."""
    if hides.dtype != torch.bool:
        return hides.detach()
    return torch.zeros_like(hides, dtype=dtype).masked_fill(hides, -math.inf)


def masked_scores(score: Tensor, mask: Tensor) -> Tensor:
    """Return scores under a mask of fused attention's kind: True shows, or additive."""
    if mask.dtype == torch.bool:
        return score.masked_fill(~mask, -math.inf)
    return score + mask


# Scores held at once: 8 MiB of float32. Attention is never whole in memory.
BLOCK_ELEMENTS = 1 << 21
# A piece is read once and forgotten: 4 MiB. Smaller ones would be read from a nearer
# cache, and cost more in calls than that saves.
PIECE_ELEMENTS = 1 << 20
# Fewer queries would wait for the keys; more would meet more keys of the future.
PIECE_QUERIES = 128
# Of so few keys half as many queries are read at a time: fewer keys of the future.
_SHORT = 512

# Here every token sees itself, padding too: a key that only itself sees is padding.
SEES_ITSELF = {"XLNetRelativeAttention"}

ALL = slice(None)


class Where(NamedTuple):
    """Some queries of some heads of some sequences."""

    sequences: slice = ALL
    heads: slice = ALL
    queries: slice = ALL


Room = tuple[Tensor, Tensor]
"""A buffer for scores, and the keys of some heads in one piece."""
Modify = Callable[[Tensor, Where, Tensor], Tensor]
"""Changes scores_bhqk: where they are in the call, and which queries they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What an attention function was given: either q and k, or the scores themselves.

    Scores include the model's scale. A key is visible where the mask does not hide it;
    hidden keys read -inf, whichever large negative number the model used.
    """

    module: nn.Module | None
    """The module whose forward made the call."""
    kind: str
    """Which entry point: ``sdpa``, ``softmax``, ``mha``, ``flex``, ``weights``."""
    q_BHQD: Tensor | None = None
    k_BGKD: Tensor | None = None
    v_BGKD: Tensor | None = None
    scores_BHQK: Tensor | None = None
    weights_BHQK: Tensor | None = None
    """What mixed the values, where it is known apart from the scores: a model may hide
    keys after its softmax."""
    mask: Tensor | None = None
    """Boolean (True = visible) or additive, broadcastable to (B, H, Q, K)."""
    causal: bool = False
    scale: float = 1.0
    modify: Modify | None = None
    """Changes the scores, as ``flex_attention`` lets users do."""
    by_place: Callable[["AttentionCall"], tuple[Tensor, Tensor] | None] | None = None
    """Where ``modify`` hides keys by their places alone: which keys are seen, (B, K),
    and each row's first key, (B, Q), without a look at the scores; else None."""
    cross: bool = False
    """The keys are of another sequence than the queries."""
    extra_keys: int = 0
    """Columns at the end that are no token: learned sinks, ``bias_k``, a zero key."""
    sinks: int = 0
    """The last of these columns: what carries no value, and so is not a key."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (B, H, Q, K)."""
        if self.scores_BHQK is not None:
            B, H, Q, K = self.scores_BHQK.shape
            return B, H, Q, K
        assert self.q_BHQD is not None and self.k_BGKD is not None
        B, H, Q, _ = self.q_BHQD.shape
        return B, H, Q, self.k_BGKD.shape[2]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, scores_BHqK) with hidden keys at -inf, a block at a time.

        Under a causal mask the keys stop at the block's last query: what lies beyond
        is hidden from every row of the block.
        """
        B, H, Q, K = self.shape
        for queries in _cut(Q, max(1, BLOCK_ELEMENTS // max(1, B * H * K))):
            yield queries, self.scores(queries)

    def pieces(self) -> Iterator[tuple[Where, Tensor]]:
        """Yield (where, scores_bhqk), all in one buffer: read each before the next.

        One buffer, because blocks that grow with the causal mask leave holes in the
        heap that none of their successors fits into. A causal mask is left to the
        caller: row i sees the keys up to ``queries.start`` + i; what lies beyond was
        not hidden, which saves a visit to all scores.
        """
        sizes = self._piece()
        buffer = self._buffer(sizes)
        parts = [_cut(n, size) for n, size in zip(self.shape[:3], sizes, strict=True)]
        for sequences, heads in product(*parts[:2]):
            # Copied once for all queries, and not for all heads at once.
            k_bgKD = self._keys(Where(sequences, heads))
            room = None if buffer is None else (buffer, k_bgKD.contiguous())
            for where in (Where(sequences, heads, queries) for queries in parts[2]):
                yield where, self._scores(where, hide_future=False, room=room)

    def _piece(self) -> tuple[int, int, int]:
        """Return how many sequences, heads and queries a piece holds."""
        B, H, Q, K = self.shape
        rows = max(1, PIECE_ELEMENTS // max(1, K))
        group = 1 if self.k_BGKD is None else H // self.k_BGKD.shape[1]
        most = PIECE_QUERIES // 2 if K <= _SHORT else PIECE_QUERIES
        queries = max(1, min(Q, most, rows // group))
        heads = max(1, min(H, rows // queries) // group) * group
        sequences = rows // (heads * queries) if heads == H else 1
        return max(1, min(B, sequences)), heads, queries

    def _buffer(self, sizes: tuple[int, int, int]) -> Tensor | None:
        if self.q_BHQD is None:
            return None
        dtype = _wide(self.q_BHQD.dtype)
        return self.q_BHQD.new_empty(prod(sizes) * self.shape[3], dtype=dtype)

    def scores(self, queries: slice) -> Tensor:
        """Return scores_BHqK of some queries, hidden keys at -inf, at least float32."""
        return self._scores(Where(queries=queries), hide_future=True)

    def _scores(
        self, where: Where, *, hide_future: bool, room: Room | None = None
    ) -> Tensor:
        queries = where.queries
        keys = slice(0, queries.stop if self.causal else self.shape[3])
        scores = self._raw(where, keys, room)
        if self.mask is not None:
            scores = _masked(scores, _window(self.mask, *where, keys))
        if self.causal and hide_future:
            future_qk = future_QK(queries, scores.shape[-1], device=scores.device)
            scores = scores.masked_fill_(future_qk, -math.inf)
        if self.modify is not None:
            i_q = torch.arange(queries.start, queries.stop, device=scores.device)
            scores = self.modify(scores, where, i_q)
        from_q_and_k = self.scores_BHQK is None and self.modify is None
        if from_q_and_k and (self.mask is None or self.mask.dtype == torch.bool):
            return scores  # nothing but -inf hides here: one visit less
        return scores.masked_fill_(is_masked(scores), float("-inf"))

    def visible_bqK(self, i_q: Tensor) -> Tensor:
        """Return which token keys some queries of the first head see: (B or 1, q, K).

        No score is computed: masks tell, and where a kernel has a rule of its own, what
        it makes of scores of zero. One head is asked: masks are alike, choices not.
        """
        B, _, _, K = self.shape
        tokens = K - self.extra_keys
        if self.scores_BHQK is not None:
            return ~is_masked(self.scores_BHQK.detach()[:, 0, i_q, :tokens])
        seen = torch.ones(1, len(i_q), K, dtype=torch.bool, device=i_q.device)
        if self.causal:
            seen = seen & (torch.arange(K, device=i_q.device) <= i_q[:, None])
        if self.mask is not None:
            mask = _window(self.mask, ALL, ALL, ALL, ALL)[:, 0]
            seen = seen & ~_hides(mask[:, i_q] if mask.shape[1] > 1 else mask)
        if self.modify is not None:
            wide = B if self.mask is None else len(seen)
            flat = torch.zeros(wide, 1, len(i_q), K, device=i_q.device)
            where = Where(slice(0, wide), slice(0, 1))
            changed = self.modify(flat, where, i_q)
            seen = seen[..., : changed.shape[-1]] & ~is_masked(changed[:, 0])
        return seen[..., :tokens]

    def mixed_bqK(self, i_q: Tensor) -> Tensor | None:
        """Return which of those keys had a weight; None where weights are not known.

        A model may hide keys after its softmax; dropout hides some as well.
        """
        if self.weights_BHQK is None:
            return None
        tokens = self.shape[3] - self.extra_keys
        return self.weights_BHQK.detach()[:, 0, i_q, :tokens] != 0

    def counted_BQ(self) -> Tensor:
        """Return where a query is real: False for padding, which no query may see.

        In self-attention a token whose key is hidden from every query is padding, and
        its own row no more than an accident of the mask. Where rows choose their keys
        (top-k attention), a token may be hidden because no query chose it: there only
        the ends of a sequence count as padding. Costs one pass over the mask, or over
        the scores where neither a mask nor places tell.
        """
        B, _, Q, K = self.shape
        # A causal mask alone hides no key from all queries: each token sees itself.
        unmasked = self.mask is None and self.modify is None and self.q_BHQD is not None
        if self.cross or unmasked or Q != K - self.extra_keys:
            like = self.q_BHQD if self.scores_BHQK is None else self.scores_BHQK
            assert like is not None
            return torch.ones(B, Q, dtype=torch.bool, device=like.device)
        if self.by_place and (found := self.by_place(self)) is not None:
            return found[0][:, :Q]
        seen_BQ = self._seen_BK()[:, :Q]  # keys beyond the tokens (sinks) tell nothing
        real_BQ = torch.where(self._chosen_B1(seen_BQ), _inner(seen_BQ), seen_BQ)
        return real_BQ.expand(B, Q)

    def first_key_BQ(self) -> Tensor | None:
        """Return the first key of each row's sequence; None where all begin at key 0.

        A sequence begins at the first key that a row sees, or that this key's own row
        sees, and so on: past left padding, at a packed document's first token, and not
        at the edge of a window. Where rows choose their keys, at the first one that any
        row sees; with other keys than queries, at the first one that the row sees.
        """
        B, _, Q, K = self.shape
        tokens = K - self.extra_keys
        if self._all_see_first():
            return None
        if self.by_place and (found := self.by_place(self)) is not None:
            return found[1]
        seen = [v_BqK[..., :tokens] for v_BqK in self._mask_BqK()]
        first_BQ = torch.cat([v.byte().argmax(-1) for v in seen], 1).expand(B, Q)
        if self.cross or Q != tokens:
            return first_BQ
        for _ in range(Q.bit_length()):
            first_BQ = torch.minimum(first_BQ, first_BQ.gather(1, first_BQ))
        seen_BQ = self._seen_BK()[:, :Q]
        of_all_B1 = seen_BQ.byte().argmax(-1, keepdim=True)
        return torch.where(self._holes_B1(seen_BQ), of_all_B1, first_BQ)

    def _all_see_first(self) -> bool:
        """Return whether key 0 is hidden from no row; on a device if it is free."""
        if self.modify is not None:
            return False
        if self.mask is not None:
            return self.mask.is_cpu and not bool(_hides(self.mask[..., :1]).any())
        if self.scores_BHQK is not None:
            column_BQ = self.scores_BHQK.detach()[:, 0, :, 0]
            return column_BQ.is_cpu and not bool(is_masked(column_BQ).any())
        return True

    def _mask_BqK(self) -> Iterator[Tensor]:
        """Yield the same as ``_visible_BqK``, but for a causal mask beside another."""
        if self.mask is not None and self.modify is None:
            yield ~_hides(_window(self.mask, ALL, ALL, ALL, ALL)[:, 0])
        else:
            yield from self._visible_BqK()

    def _chosen_B1(self, seen_BK: Tensor) -> Tensor:
        """Return where rows choose keys, of which some are hidden from all."""
        if seen_BK.is_cpu and bool(seen_BK.all()):
            return seen_BK.new_zeros(1, 1)
        return self._holes_B1(seen_BK)

    def _holes_B1(self, seen_BK: Tensor) -> Tensor:
        """Return where rows choose keys: a row that hides one between two it sees.

        Padding, causal masks, windows and packed documents leave every row one run of
        the keys that any row sees. One head is asked: masks are alike, choices not.
        """
        place_BK = seen_BK.cumsum(-1) - 1
        tokens = seen_BK.shape[-1]
        holes = [
            _has_hole(v_BqK[..., :tokens], place_BK) for v_BqK in self._visible_BqK()
        ]
        return torch.stack(holes).any(0)[:, None]

    def _visible_BqK(self) -> Iterator[Tensor]:
        """Yield which keys the queries of the first head see, some at a time."""
        if self.mask is not None and not self.causal and self.modify is None:
            yield ~_hides(_window(self.mask, ALL, ALL, ALL, ALL)[:, 0])
        elif self.scores_BHQK is not None:
            yield ~is_masked(self.scores_BHQK.detach()[:, 0])
        else:
            K = self.shape[3]
            for _, s_BHqk in self.blocks():
                seen_Bqk = ~is_masked(s_BHqk[:, 0])
                yield F.pad(seen_Bqk, (0, K - seen_Bqk.shape[-1]), value=False)

    def _seen_BK(self) -> Tensor:
        """Return which keys any query of any head may see; NaN is seen."""
        if self.mask is not None and not self.causal and self.modify is None:
            mask = _window(self.mask, ALL, ALL, ALL, ALL)
            if mask.dtype == torch.bool:
                return mask.any(2).any(1)
            return ~is_masked(mask.amax((1, 2)))
        if self.scores_BHQK is not None:
            scores = self.scores_BHQK.detach()
            if type(self.module).__name__ in SEES_ITSELF:
                own = torch.eye(*scores.shape[2:], device=scores.device)
                scores = scores.masked_fill(own.bool(), MASKED)
            return ~is_masked(scores.amax((1, 2)))
        K = self.shape[3]
        best = [s_BHqK.amax((1, 2)) for _, s_BHqK in self.blocks()]
        best = [F.pad(b_Bk, (0, K - b_Bk.shape[1]), value=MASKED) for b_Bk in best]
        return ~is_masked(torch.stack(best).amax(0))

    def _raw(self, where: Where, keys: slice, room: Room | None) -> Tensor:
        """Return scores that are ours to change."""
        if self.scores_BHQK is not None:
            theirs = self.scores_BHQK.detach()[(*where, keys)]
            return theirs.to(_wide(theirs.dtype), copy=True)
        assert self.q_BHQD is not None
        q_bhqD, wide = self.q_BHQD.detach()[where], _wide(self.q_BHQD.dtype)
        buffer, k_bgKD = room or (None, self._keys(where))
        k_bgkD = k_bgKD[:, :, keys].to(wide)
        return _grouped_scores(q_bhqD.to(wide) * self.scale, k_bgkD, buffer)

    def _keys(self, where: Where) -> Tensor:
        """Return the keys that serve some heads of some sequences, none of scores."""
        if self.k_BGKD is None:
            return torch.empty(0)
        group, part = self.shape[1] // self.k_BGKD.shape[1], where.heads
        served = slice(*(h and h // group for h in (part.start, part.stop)))
        return self.k_BGKD.detach()[where.sequences, served]


def _grouped_scores(q_bhqD: Tensor, k_bgkD: Tensor, buffer: Tensor | None) -> Tensor:
    """Return q kᵀ where each key head serves h/g query heads; keys are not repeated."""
    b, h, q, D = q_bhqD.shape
    g, k = k_bgkD.shape[1:3]
    grouped = q_bhqD.reshape(b, g, h // g * q, D)
    if buffer is None:
        return (grouped @ k_bgkD.mT).view(b, h, q, k)
    out = buffer[: b * h * q * k].view(b, g, h // g * q, k)
    return torch.matmul(grouped, k_bgkD.mT, out=out).view(b, h, q, k)


def _has_hole(seen_BqK: Tensor, place_BK: Tensor) -> Tensor:
    """Return where some row's visible keys are not one run of places."""
    place_BqK = place_BK[:, None, : seen_BqK.shape[-1]]
    last_Bq = place_BqK.where(seen_BqK, -1).amax(-1)
    first_Bq = place_BqK.where(seen_BqK, place_BK.shape[-1]).amin(-1)
    return (last_Bq - first_Bq + 1 > seen_BqK.sum(-1)).any(-1)


def _inner(seen_BK: Tensor) -> Tensor:
    """Return True from the first key that is seen to the last."""
    so_far_BK = seen_BK.cumsum(-1) > 0
    still_BK = seen_BK.flip(-1).cumsum(-1).flip(-1) > 0
    return so_far_BK & still_BK


def _cut(whole: int, size: int) -> list[slice]:
    """Return slices of nearly one size that cover the whole.

    >>> _cut(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    step = -(-whole // max(1, -(-whole // size)))
    return [slice(i, min(i + step, whole)) for i in range(0, whole, max(1, step))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _window(mask: Tensor, *parts: slice) -> Tensor:
    mask = mask.detach()
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    shape = mask.shape
    return mask[tuple(p if n > 1 else ALL for p, n in zip(parts, shape, strict=True))]


def _hides(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else is_masked(mask.detach())


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, float("-inf"))
    return scores.add_(mask.to(scores.dtype))
