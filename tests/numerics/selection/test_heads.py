"""Whole layers in blocks against one row at a time: masks, groups, dtypes, rivals."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS, attention_weights
from equipoise.numerics.selection import (
    HeadMetricOptions,
    Selection,
    chosen,
    distance,
    heads,
    published_bound,
    selection_of_blocks,
    selection_of_heads,
    selection_of_weights,
    separability,
    weighted_tokens,
)
from equipoise.numerics.selection import tokens as scores
from tests.conftest import FLOATS

B, H, G, L, D, F = 2, 4, 2, 18, 6, 5
TOPS = (1, 3, 8)
INF = float("inf")


def layer(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return (
        torch.randn(B, H, L, D, generator=rng, dtype=torch.float64).to(dtype),
        torch.randn(B, G, L, D, generator=rng, dtype=torch.float64).to(dtype),
        torch.randn(B, G, L, F, generator=rng, dtype=torch.float64).to(dtype),
    )


def dense(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return scores with the keys of each group repeated and hidden ones at -inf."""
    z = q.double() @ k.double().repeat_interleave(H // G, 1).mT / D**0.5
    return z if mask is None else z.masked_fill(~mask, -INF)


def assert_is(
    found: Selection, z: Tensor, tokens: Tensor, rival: str = "softmax"
) -> None:
    """Every reading is the one of its own row, taken alone."""
    w = attention_weights(NORMALISERS[rival](), z)
    for b, h, q in ((0, 0, 17), (1, 1, 9), (0, 2, 3), (1, 3, 12)):
        tokens_KF = tokens[b, h * tokens.shape[1] // H]
        seen = z[b, h, q] > -INF
        row = weighted_tokens(w[b, h, q][None, seen], tokens_KF[seen])
        for t, top in enumerate(TOPS):
            alone, at = distance(row, top), found.at
            assert at.distance is not None and at.euclidean is not None
            assert at.cosine is not None and at.published is not None
            pairs = {
                "value": (at.distance.value, alone.value),
                "upper": (at.distance.upper, alone.upper),
                "expected": (at.distance.expected_upper, alone.expected_upper),
                "published": (at.published, published_bound(chosen(row, top))),
                "recall": (at.euclidean.recall, separability(row, top).recall),
                "margin": (
                    at.cosine.margin,
                    separability(row, top, metric="cosine").margin,
                ),
            }
            for name, (mine, theirs) in pairs.items():
                got = mine[b, h, q, t].item()
                close = pytest.approx(theirs.item(), rel=1e-4, abs=1e-5, nan_ok=True)
                assert got == close, name


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_read_what_rows_read(
    dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the blocks: one query at a time, or everything at once."""
    if small:
        monkeypatch.setattr(heads, "WEIGHTS", 3 * L)
        monkeypatch.setattr(scores, "SCORES", 5 * B * H * L)
    q, k, v = layer(dtype)
    wanted = HeadMetricOptions(tops=TOPS, published=True)
    found = selection_of_heads(q, k, v, wanted=wanted, causal=True)
    after = torch.ones(L, L).tril().bool()
    assert_is(found, dense(q, k, after), v.double())
    assert found.concentration.visible[0, 0].tolist() == list(range(1, L + 1))
    assert found.at.distance is not None
    assert found.at.distance.value.shape == (B, H, L, len(TOPS))


def test_padding_hides_keys_as_boolean_or_additive_mask() -> None:
    q, k, v = layer()
    pad = torch.ones(B, 1, 1, L, dtype=torch.bool)
    pad[1, ..., 14:] = False
    wanted = HeadMetricOptions(tops=TOPS, published=True)
    found = selection_of_heads(q, k, v, wanted=wanted, mask=pad, causal=True)
    mask = pad & torch.ones(L, L).tril().bool()
    assert_is(found, dense(q, k, mask), v)
    added = torch.zeros(pad.shape).masked_fill(~pad, -INF)
    again = selection_of_heads(q, k, v, wanted=wanted, mask=added, causal=True)
    assert found.at.distance is not None and again.at.distance is not None
    torch.testing.assert_close(
        again.at.distance.value, found.at.distance.value, equal_nan=True
    )


@pytest.mark.parametrize("rival", ["ssmax", "sparsemax", "sigmoid", "softmax1"])
def test_rivals_weigh_in_their_own_way(rival: str) -> None:
    q, k, v = layer()
    found = selection_of_heads(
        q,
        k,
        v,
        wanted=HeadMetricOptions(tops=TOPS, published=True),
        normaliser=NORMALISERS[rival](),
    )
    assert_is(found, dense(q, k), v, rival)


def test_hidden_states_serve_every_head() -> None:
    q, k, _ = layer()
    h_B1KF = layer()[2][:, :1]
    found = selection_of_heads(
        q, k, h_B1KF, wanted=HeadMetricOptions(tops=TOPS, published=True)
    )
    assert_is(found, dense(q, k), h_B1KF)


def test_temperature_and_scale_divide_alike() -> None:
    q, k, v = layer()
    hot = selection_of_heads(q, k, v, temperature=2.0)
    soft = selection_of_heads(q, k, v, scale=0.5 * D**-0.5)
    torch.testing.assert_close(hot.concentration.rho, soft.concentration.rho)
    assert hot.at.distance is not None and soft.at.distance is not None
    torch.testing.assert_close(
        hot.at.distance.value, soft.at.distance.value, equal_nan=True
    )


def test_later_queries_see_the_keys_before_them() -> None:
    """A block of new queries against a longer cache: the mask is aligned at the end."""
    q, k, v = layer()
    found = selection_of_heads(q[:, :, -4:], k, v, causal=True)
    whole = selection_of_heads(q, k, v, causal=True)
    assert found.concentration.visible[0, 0].tolist() == [15, 16, 17, 18]
    torch.testing.assert_close(
        found.concentration.entropy, whole.concentration.entropy[:, :, -4:]
    )


def test_weights_alone_are_enough_for_sizes() -> None:
    q, k, v = layer()
    seen = torch.ones(L, L).tril().bool()
    w = dense(q, k, seen).softmax(-1)
    wanted = HeadMetricOptions(tops=TOPS)
    at = selection_of_weights(w, v, wanted=wanted, mask=seen)
    found = selection_of_heads(q, k, v, wanted=wanted, causal=True)
    assert at.euclidean is not None and found.at.euclidean is not None
    torch.testing.assert_close(
        at.euclidean.margin, found.at.euclidean.margin, equal_nan=True
    )


def test_parts_not_asked_for_are_none_and_the_control_is_seeded() -> None:
    q, k, v = layer()
    bare = HeadMetricOptions(tops=(2,), distance=False, separability=False)
    at = selection_of_heads(q, k, v, wanted=bare).at
    assert at.distance is at.published is at.euclidean is at.random_cosine is None
    control = HeadMetricOptions(tops=(2, 4), random=3, seed=7)
    one, two = (selection_of_heads(q, k, v, wanted=control).at for _ in range(2))
    assert one.random_euclidean is not None and two.random_euclidean is not None
    torch.testing.assert_close(
        one.random_euclidean.margin, two.random_euclidean.margin, rtol=0, atol=0
    )
    assert one.random_euclidean.recall.shape == (B, H, L, 2)


def test_means_per_head_leave_out_what_has_no_reading() -> None:
    q, k, v = layer()
    wanted = HeadMetricOptions(tops=(3,), published=True, random=1)
    found = selection_of_heads(q, k, v, wanted=wanted, causal=True)
    real = torch.ones(B, L, dtype=torch.bool)
    real[1, 10:] = False
    means = found.per_head(real)
    assert found.at.euclidean is not None
    recall = found.at.euclidean.recall[..., 0]
    kept = torch.cat([recall[0, :, 3:], recall[1, :, 3:10]], -1)
    torch.testing.assert_close(means["euclidean.recall"][:, 0], kept.mean(-1))
    rho = found.concentration.rho
    kept = torch.cat([rho[0, :, 1:], rho[1, :, 1:10]], -1)
    torch.testing.assert_close(means["rho"], kept.mean(-1))
    everything = found.per_head()
    assert everything["distance.published"].shape == (H, 1)
    assert everything["random_cosine.f"].shape == (H, 1)
    assert found.broken == 0


def test_nan_stays_in_the_rows_that_see_it() -> None:
    q, k, v = layer()
    k[0, 1, 9, 0] = math.nan
    v[1, 0, 4, 0] = math.nan
    found = selection_of_heads(
        q, k, v, wanted=HeadMetricOptions(tops=(2,)), causal=True
    )
    assert found.at.distance is not None
    lost = found.at.distance.value[..., 0].isnan()
    expected = torch.zeros(B, H, L, dtype=torch.bool)
    expected[:, :, :2] = True  # no more keys than chosen
    expected[0, 2:, 9:] = True
    expected[1, :2, 4:] = True
    assert torch.equal(lost, expected)
    assert found.broken == 2 * (L - 9)


@pytest.mark.parametrize("tops", [(), (0, 1)])
def test_broken_options(tops: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        HeadMetricOptions(tops=tops)


def test_broken_inputs() -> None:
    q, k, v = layer()
    with pytest.raises(InputError, match="length, width"):
        selection_of_heads(q[0], k, v)
    with pytest.raises(InputError, match="length, width"):
        selection_of_heads(q[:, :3], k, v)
    with pytest.raises(InputError, match="do not agree"):
        selection_of_heads(q[..., :3], k, v)
    with pytest.raises(InputError, match="more queries than keys"):
        selection_of_heads(q, k[:, :, :4], v, causal=True)
    with pytest.raises(InputError, match="do not fit tokens"):
        selection_of_heads(q, k, v[:1])
    with pytest.raises(InputError, match="nothing to measure"):
        selection_of_blocks(iter(()), v)
