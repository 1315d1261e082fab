"""One call's scores: masks, groups, causality, padding, against dense formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy import calls
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from tests.conftest import FLOATS, error_budget

B, H, Q, K, D = 2, 4, 5, 7, 8


class Fused(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def captured(*args: Any, **kwargs: Any) -> AttentionCall:
    model, found = Fused(), []
    with Interceptor(anatomy_of(model), found.append):
        model(*args, **kwargs)
    (call,) = found
    return call


def rows(call: AttentionCall) -> Tensor:
    return torch.cat(
        [F.pad(s.softmax(-1), (0, K - s.shape[-1])) for _, s in call.blocks()], 2
    )


def qkv(rng: torch.Generator, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(B, H, n, D, generator=rng).to(dtype) for n in (Q, K, K)]


MASK = torch.rand(B, 1, Q, K, generator=torch.Generator().manual_seed(5)) > 0.3
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "bool mask": ((), {"attn_mask": MASK}),
    "float mask": ((torch.randn(B, H, Q, K, dtype=torch.float64),), {}),
    "one mask for all": ((torch.ones(Q, K, dtype=torch.bool).tril(2),), {}),
    "padding": ((MASK[:, :, :1],), {}),
    "causal, positional": ((None, 0.0, True), {}),
    "scale": ((), {"scale": 0.3, "is_causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_what_values_are_mixed_with(case: str, rng: torch.Generator) -> None:
    """An identity for values makes torch's own output the rows."""
    q, k, _ = qkv(rng)
    args, kwargs = CASES[case]
    identity = torch.eye(K, dtype=q.dtype).expand(B, H, K, K)
    truth = F.scaled_dot_product_attention(q, k, identity, *args, **kwargs)
    torch.testing.assert_close(rows(captured(q, k, identity, *args, **kwargs)), truth)


def test_groups_share_keys_without_copies(rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    k, v = k[:, :2], torch.eye(K, dtype=q.dtype).expand(B, 2, K, K)
    truth = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(rows(captured(q, k, v, enable_gqa=True)), truth)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reads_in_at_least_single_precision(dtype: Any, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, dtype)
    (_, scores), *_ = captured(q, k, v).blocks()
    truth = q.double() @ k.double().mT / D**0.5
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    budget = error_budget(scores.dtype, ops=8 * D)
    torch.testing.assert_close(scores.double(), truth, rtol=0, atol=budget)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_other_axes(axes: int, rng: torch.Generator) -> None:
    q, k, v = (x.flatten(0, 1)[:8] for x in qkv(rng))
    if axes == 2:
        q, k, v = q[0], k[0], v[0]
    if axes == 5:
        q, k, v = (x.unflatten(0, (2, 2, 2)) for x in (q, k, v))
    call = captured(q, k, v)
    (_, scores), *_ = call.blocks()
    torch.testing.assert_close(scores.flatten(), (q * D**-0.5 @ k.mT).flatten())


def test_blocks_are_the_whole(monkeypatch: Any, rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    call = captured(q, k, v, is_causal=True)
    whole = rows(call)
    monkeypatch.setattr(calls, "BLOCK_ELEMENTS", B * H * K * 2)
    assert len(list(call.blocks())) == 3
    torch.testing.assert_close(rows(call), whole)


@pytest.mark.parametrize("elements", [1, K, 3 * K, H * Q * K, 1 << 18])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_the_whole(
    case: str, elements: int, monkeypatch: Any, rng: torch.Generator
) -> None:
    """Each piece is copied away at once: the next is written where it was."""
    monkeypatch.setattr(calls, "PIECE_ELEMENTS", elements)
    monkeypatch.setattr(calls, "PIECE_QUERIES", 3)
    q, k, v = qkv(rng)
    args, kwargs = CASES[case]
    for call in (
        captured(q, k, v, *args, **kwargs),
        captured(q, k[:, :2], v[:, :2], *args, enable_gqa=True, **kwargs),
    ):
        whole = call.scores(slice(0, Q))
        read, seen = torch.full_like(whole, torch.nan), whole.shape[3]
        for where, piece in call.pieces():
            read[*where, : piece.shape[-1]] = piece
        hidden = read.isnan()  # keys that no row of the piece sees
        if call.causal:
            hidden |= ~torch.ones(Q, seen, dtype=torch.bool).tril()
        torch.testing.assert_close(read.masked_fill(hidden, float("-inf")), whole)


@pytest.mark.parametrize("elements", [1, 8, 1 << 18])
def test_what_changes_scores_is_given_their_place(
    elements: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(calls, "PIECE_ELEMENTS", elements)
    q, added = torch.randn(2, 3, 4, D), torch.randn(2, 3, 4, 4)
    call = AttentionCall(
        module=None,
        kind="flex",
        q_BHQD=q,
        k_BGKD=q,
        modify=lambda s, at, i_q: s + added[at.sequences, at.heads][:, :, i_q],
    )
    read = torch.full_like(added, torch.nan)
    for where, piece in call.pieces():
        read[where] = piece
    torch.testing.assert_close(read, q @ q.mT + added)


def test_scores_of_the_model_are_not_written_to() -> None:
    theirs = torch.full((1, 2, 3, 3), -1e9)
    call = AttentionCall(module=None, kind="softmax", scores_BHQK=theirs)
    assert all((piece == float("-inf")).all() for _, piece in call.pieces())
    assert (theirs == -1e9).all()


HIDE = {"lowest": torch.finfo(torch.float32).min, "-1e9": -1e9, "-1e4": -1e4}


@pytest.mark.parametrize("how", ["bool", "-inf", *HIDE])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_queries_do_not_count(how: str, causal: bool) -> None:
    """Token 3 of the second sentence is padding: no query may see it."""
    visible = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    visible[1, ..., 3] = False
    visible = visible & torch.ones(4, 4).tril().bool() if causal else visible
    low = HIDE.get(how, float("-inf"))
    hidden = torch.zeros(visible.shape).masked_fill(~visible, low)
    q = torch.randn(2, 3, 4, D, generator=torch.Generator().manual_seed(0))
    mask = visible if how == "bool" else hidden
    expected = torch.tensor([[True] * 4, [True] * 3 + [False]])
    assert torch.equal(captured(q, q, q, mask).counted_BQ(), expected)
    scores = (q @ q.mT).where(visible, torch.tensor(low))
    eager = AttentionCall(module=None, kind="softmax", scores_BHQK=scores)
    assert torch.equal(eager.counted_BQ(), expected)
    (_, read), *_ = eager.blocks()
    assert torch.equal(read > float("-inf"), visible.expand_as(read))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_token_that_no_query_chose_is_no_padding(
    heads: int, causal: bool, padding: int
) -> None:
    """Top-k attention: what few queries choose is hidden from all, and still read."""
    L, chosen = 64, 4
    rng = torch.Generator().manual_seed(heads)
    q = torch.randn(2, heads, L, D, generator=rng)
    scores = q @ q[:, :, :, :].mT + 4 * torch.randn(1, 1, 1, L, generator=rng)
    visible = torch.ones(L, L, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    visible = visible.expand(2, 1, L, L).clone()
    visible[1, ..., L - padding :] = False
    scores = scores.masked_fill(~visible, float("-inf"))
    scores[..., 0] += 20.0 * visible[..., 0]  # both ends are chosen by every query
    scores[..., L - padding - 1] += 20.0 * visible[..., L - padding - 1]
    scores[0, ..., L - 1] += 20.0 * visible[0, ..., L - 1]
    least = scores.topk(chosen, dim=-1).values[..., -1:]
    sparse = scores.masked_fill(scores < least, float("-inf"))
    hidden = sparse.isneginf().all(2).all(1)
    assert hidden[0].sum() > 5  # no query chose these
    expected = torch.ones(2, L, dtype=torch.bool)
    expected[1, L - padding :] = False
    call = AttentionCall(module=None, kind="softmax", scores_BHQK=sparse)
    assert torch.equal(call.counted_BQ(), expected)
    masked = AttentionCall(
        module=None, kind="sdpa", q_BHQD=q, k_BGKD=q, mask=~sparse.isneginf()
    )
    assert torch.equal(masked.counted_BQ(), expected)


def test_padding_in_the_middle_is_left_out() -> None:
    """Text, its padding, then patches of an image: every row hides the same keys."""
    visible = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    visible[..., 3:5] = False
    q = torch.randn(1, 2, 8, D, generator=torch.Generator().manual_seed(0))
    counted = captured(q, q, q, visible.expand(1, 1, 8, 8)).counted_BQ()
    assert counted.tolist() == [[True] * 3 + [False] * 2 + [True] * 3]


def test_no_token_is_padding_across_sequences_or_without_a_mask() -> None:
    q = torch.randn(2, 3, 4, D)
    hidden = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    crossed = AttentionCall(
        module=None, kind="sdpa", q_BHQD=q, k_BGKD=q, mask=hidden, cross=True
    )
    assert crossed.counted_BQ().all()
    assert captured(q, q, q, is_causal=True).counted_BQ().all()


def test_a_broken_score_is_not_mistaken_for_padding() -> None:
    scores = torch.full((1, 1, 2, 2), float("nan"))
    assert (
        AttentionCall(module=None, kind="softmax", scores_BHQK=scores)
        .counted_BQ()
        .all()
    )
