"""One attention call, as it was made, and how to read its scores again in blocks.

Axes, in this file:  B batch · H head · G key-value head · Q query · K key · D width ·
q the queries of one block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Scores held at once: 8 MiB of float32. Attention is never whole in memory.
BLOCK_ELEMENTS = 1 << 21
# At or below this score a key is hidden. Models hide with -inf, the lowest number of a
# dtype, -1e9, or (BERT's first code) -1e4 plus the score; no living logit is that low.
HIDDEN = -9e3

# Here every token sees itself, padding too: whom only it sees, nobody does.
SEES_ITSELF = {"XLNetRelativeAttention"}

Modify = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What an attention function was given: either q and k, or the scores themselves.

    Scores include the model's scale. A key is visible where the mask does not hide it;
    hidden keys read -inf, whichever large negative number the model used.
    """

    module: nn.Module | None
    """The module whose forward made the call."""
    kind: str
    """Which entry point: ``sdpa``, ``softmax``, ``mha``, ``flex``."""
    q_BHQD: Tensor | None = None
    k_BGKD: Tensor | None = None
    v_BGKD: Tensor | None = None
    scores_BHQK: Tensor | None = None
    mask: Tensor | None = None
    """Boolean (True = visible) or additive, broadcastable to (B, H, Q, K)."""
    causal: bool = False
    scale: float = 1.0
    modify: Modify | None = None
    """Changes the scores of a block of queries, as ``flex_attention`` lets users do."""
    cross: bool = False
    """The keys are of another sequence than the queries."""
    extra_keys: int = 0
    """Columns at the end that are no token: learned sinks, ``bias_k``, a zero key."""

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
        for queries in self._steps():
            yield queries, self.scores(queries)

    def causal_blocks(self) -> Iterator[tuple[int | None, Tensor]]:
        """Yield (first query or None, scores_BHqK): a causal mask is left to you.

        With a first query, row i of the block sees the keys up to that query + i only;
        what lies beyond was not hidden, which saves a visit to all scores.
        """
        for queries in self._steps():
            scores = self.scores(queries, hide_future=False)
            yield queries.start if self.causal else None, scores

    def _steps(self) -> Iterator[slice]:
        """Yield queries in parts of one size, as many as one block holds."""
        B, H, Q, K = self.shape
        most = max(1, BLOCK_ELEMENTS // max(1, B * H * K))
        step = -(-Q // max(1, -(-Q // most)))
        for start in range(0, Q, step):
            yield slice(start, min(start + step, Q))

    def scores(self, queries: slice, *, hide_future: bool = True) -> Tensor:
        """Return scores_BHqK of some queries, hidden keys at -inf, at least float32."""
        keys = slice(0, queries.stop if self.causal else self.shape[3])
        scores = self._raw(queries, keys)
        ours = self.scores_BHQK is None
        if self.mask is not None:
            scores, ours = _masked(scores, _window(self.mask, queries, keys)), True
        if self.causal and hide_future:
            after = _after(queries, scores)
            fill = scores.masked_fill_ if ours else scores.masked_fill
            scores = fill(after, float("-inf"))
        if self.modify is not None:
            scores = self.modify(scores, queries)
        if ours and (self.mask is None or self.mask.dtype == torch.bool):
            if self.modify is None:
                return scores  # nothing but -inf hides here: one visit less
        return scores.masked_fill(scores <= HIDDEN, float("-inf"))

    def counted_BQ(self) -> Tensor:
        """Return where a query is real: False for padding, which nobody may see.

        In self-attention a token whose key is hidden from every query is padding, and
        its own row no more than an accident of the mask. Costs one pass over the mask,
        or over the scores where there is no mask apart from them.
        """
        B, _, Q, K = self.shape
        # A causal mask alone hides no key from everybody: each token sees itself.
        unmasked = self.mask is None and self.modify is None and self.q_BHQD is not None
        if self.cross or unmasked or Q != K - self.extra_keys:
            like = self.q_BHQD if self.scores_BHQK is None else self.scores_BHQK
            assert like is not None
            return torch.ones(B, Q, dtype=torch.bool, device=like.device)
        return self._seen_BK()[:, :Q].expand(B, Q)

    def _seen_BK(self) -> Tensor:
        """Return which keys any query of any head may see; NaN is seen."""
        if self.mask is not None and not self.causal and self.modify is None:
            mask = _window(self.mask, slice(None), slice(None))
            if mask.dtype == torch.bool:
                return mask.any(2).any(1)
            return ~(mask.amax((1, 2)) <= HIDDEN)
        if self.scores_BHQK is not None:
            scores = self.scores_BHQK.detach()
            if type(self.module).__name__ in SEES_ITSELF:
                own = torch.eye(*scores.shape[2:], dtype=torch.bool)
                scores = scores.masked_fill(own.to(scores.device), HIDDEN)
            return ~(scores.amax((1, 2)) <= HIDDEN)
        K = self.shape[3]
        best = [s_BHqK.amax((1, 2)) for _, s_BHqK in self.blocks()]
        best = [F.pad(b_Bk, (0, K - b_Bk.shape[1]), value=HIDDEN) for b_Bk in best]
        return ~(torch.stack(best).amax(0) <= HIDDEN)

    def _raw(self, queries: slice, keys: slice) -> Tensor:
        if self.scores_BHQK is not None:
            return _wide(self.scores_BHQK.detach()[:, :, queries, keys])
        assert self.q_BHQD is not None and self.k_BGKD is not None
        q_BHqD = _wide(self.q_BHQD.detach()[:, :, queries]) * self.scale
        k_BGkD = _wide(self.k_BGKD.detach()[:, :, keys])
        return _grouped_scores(q_BHqD, k_BGkD)


def _grouped_scores(q_BHqD: Tensor, k_BGkD: Tensor) -> Tensor:
    """Return q kᵀ where each key head serves H/G query heads; keys are not repeated."""
    B, H, q, D = q_BHqD.shape
    G = k_BGkD.shape[1]
    grouped = q_BHqD.reshape(B, G, H // G * q, D) @ k_BGkD.mT
    return grouped.view(B, H, q, -1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _window(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    mask = mask.detach()
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    rows = queries if mask.shape[2] > 1 else slice(None)
    return mask[:, :, rows, keys] if mask.shape[3] > 1 else mask[:, :, rows]


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores + mask.to(scores.dtype)


def _after(queries: slice, scores: Tensor) -> Tensor:
    """Return where key > query, counted from the upper left corner as torch does."""
    i = torch.arange(queries.start, queries.stop, device=scores.device)
    j = torch.arange(scores.shape[-1], device=scores.device)
    return j[None, :] > i[:, None]
