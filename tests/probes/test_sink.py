"""The sink is the first key of a row's sequence, wherever a mask lets that begin.

Axes, in this file:  B batch · H head · Q query · K key.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.auditing.selection.study import _first_mass
from equipoise.probes.attention import AttentionRows
from equipoise.probes.selection import sampled_scores, softmax_of
from tests.probes.reading import Emitter

B, H, L = 2, 3, 24
QUERY, KEY = torch.arange(L)[:, None], torch.arange(L)[None, :]
CAUSAL = KEY <= QUERY


def _left_padding() -> tuple[Tensor, Tensor]:
    """Five and no tokens of padding."""
    pads = torch.tensor([5, 0])
    shown_BQK = CAUSAL & (KEY >= pads[:, None, None])
    return shown_BQK, pads[:, None].expand(B, L)


def _both_directions() -> tuple[Tensor, Tensor]:
    pads = torch.tensor([3, 7])
    return (KEY >= pads[:, None, None]).expand(B, L, L), pads[:, None].expand(B, L)


def _documents() -> tuple[Tensor, Tensor]:
    document = torch.tensor([0] * 7 + [1] * 12 + [2] * 5)
    first = torch.tensor([0] * 7 + [7] * 12 + [19] * 5)
    same = document[:, None] == document[None, :]
    return (CAUSAL & same).expand(B, L, L), first.expand(B, L)


def _window() -> tuple[Tensor, Tensor]:
    return (CAUSAL & (KEY > QUERY - 6)).expand(B, L, L), torch.zeros(B, L).long()


def _padded_window() -> tuple[Tensor, Tensor]:
    shown_BQK, first_BQ = _left_padding()
    return shown_BQK & (KEY > QUERY - 4), first_BQ


MASKS = [_left_padding, _both_directions, _documents, _window, _padded_window]


def _given(how: str, shown_BQK: Tensor) -> AttentionCall:
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, B, H, L, 8, generator=generator)
    additive = torch.zeros(B, 1, L, L).masked_fill(~shown_BQK[:, None], -1e9)
    call = {"module": None, "q_BHQD": q, "k_BGKD": k, "kind": "sdpa"}
    if how == "scores":
        scores = q @ k.mT + additive
        return AttentionCall(module=None, kind="softmax", scores_BHQK=scores)
    if how == "modify":
        hidden = additive.expand(B, H, L, L)
        return AttentionCall(
            **call, modify=lambda z, at, i: z + hidden[at.sequences, at.heads][:, :, i]
        )  # type: ignore[arg-type]
    mask = additive if how == "additive" else shown_BQK[:, None]
    return AttentionCall(**call, mask=mask)  # type: ignore[arg-type]


def _weights(call: AttentionCall) -> Tensor:
    z_BHQK = torch.cat([z for _, z in call.blocks()], 2).double()
    return torch.nan_to_num(z_BHQK.softmax(-1))


def _expected(call: AttentionCall, shown_BQK: Tensor, first_BQ: Tensor) -> Tensor:
    p_BHQK = _weights(call)
    at = first_BQ[:, None, :, None].expand(B, H, L, 1)
    real_BQ = shown_BQK.any(1) & (shown_BQK.sum(-1) > 1)
    mass_BHQ = p_BHQK.gather(-1, at)[..., 0] * real_BQ[:, None]
    return mass_BHQ.sum((0, 2)) / real_BQ.sum()


@pytest.mark.parametrize("how", ["boolean", "additive", "scores", "modify"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_sink_is_the_first_key_of_the_sequence(
    mask: Callable[[], tuple[Tensor, Tensor]], how: str
) -> None:
    shown_BQK, first_BQ = mask()
    call, emit = _given(how, shown_BQK), Emitter()
    AttentionRows().on_attention("site", call, emit)
    expected = _expected(call, shown_BQK, first_BQ).float()
    assert float(expected.min()) > 0.005
    torch.testing.assert_close(emit.found["site", "attention.sink"], expected)


@pytest.mark.parametrize("mask", MASKS)
def test_a_sample_of_rows_and_a_study_of_selection_read_the_same_key(
    mask: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    shown_BQK, first_BQ = mask()
    call, at = _given("boolean", shown_BQK), [9, 15, L - 1]
    p_BHQK = _weights(call)
    expected = p_BHQK.gather(-1, first_BQ[:, None, :, None].expand(B, H, L, 1))[..., 0]
    found = _first_mass(softmax_of(sampled_scores(call, at)), call, at)
    torch.testing.assert_close(found, expected[:, :, at].float())
    sampled = Emitter()
    AttentionRows(rows=16).on_attention("site", call, sampled)
    value = sampled.found["site", "attention.sink"]
    assert bool((value > 0).all()) and not math.isnan(float(value.sum()))


def test_without_a_mask_and_under_a_causal_one_nothing_is_looked_for() -> None:
    """A causal mask, written out or not, hides key 0 from no row."""
    plain = _given("boolean", CAUSAL.expand(B, L, L))
    assert plain.first_key_BQ() is None
    assert _given("scores", CAUSAL.expand(B, L, L)).first_key_BQ() is None


def test_chosen_keys_and_other_keys_than_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    top = torch.rand(B, L, L, generator=generator).topk(5, -1).indices
    chosen = torch.zeros(B, L, L, dtype=torch.bool).scatter_(-1, top, True)
    seen_BK = chosen.any(1)
    found_BQ = _given("boolean", chosen).first_key_BQ()
    assert found_BQ is not None
    assert found_BQ.tolist() == seen_BK.byte().argmax(-1)[:, None].expand(B, L).tolist()
    q, k = torch.randn(B, H, 4, 8), torch.randn(B, H, L, 8)
    pads = torch.tensor([6, 2])
    shown = (KEY[0] >= pads[:, None])[:, None, None, :]
    call = AttentionCall(module=None, kind="sdpa", q_BHQD=q, k_BGKD=k, mask=shown)
    other_BQ = call.first_key_BQ()
    assert other_BQ is not None and other_BQ.tolist() == [[6] * 4, [2] * 4]
