"""Padding that is attended and rows without keys are named; their legal kin are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.watching.facts.padding import padded_BT
from tests.watching.facts.training import (
    IGNORED,
    LENGTH,
    ROWS,
    Model,
    causal,
    found,
    text,
)

PADDING, ROW = "check.padding_attended", "check.masked_row"
MASK = 1


def real(ids: Tensor) -> Tensor:
    """Return where tokens are real: a number of them that hangs on the row."""
    ends = torch.arange(4, 4 + ROWS) % (LENGTH - 3) + 4
    return torch.arange(ids.shape[1]) < ends[:, None]


def padded(step: int) -> Tensor:
    ids = text(step)
    return ids.masked_fill(~real(ids), 0)


def padded_left(step: int) -> Tensor:
    return padded(step).flip(1)


def masked(model: nn.Module, ids: Tensor, *, everywhere: bool = False) -> Tensor:
    rng = torch.Generator().manual_seed(int(ids.sum()))
    hidden = torch.rand(ids.shape, generator=rng) < 0.4
    if not everywhere:
        hidden &= ids != 0
    z = model(ids.masked_fill(hidden, MASK))
    return F.cross_entropy(z[hidden], ids[hidden])


def shows_real(ids: Tensor) -> Tensor:
    return real(ids)[:, None, None]


def next_real_token(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids.masked_fill(ids == 0, IGNORED)
    z = model(ids)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("declared", [None, 0])
@pytest.mark.parametrize("everywhere", [False, True])
def test_an_encoder_without_its_padding_mask_is_named(
    declared: int | None, everywhere: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return masked(model, ids, everywhere=everywhere)

    seen = found(Model(padding=declared), tmp_path, loss, batch=padded)
    if declared is not None and everywhere:
        return  # masks among what is declared: its run is broken, and nothing is sure
    assert seen[PADDING].severity == "warn" and seen[PADDING].params["sites"] == 2


@pytest.mark.parametrize("declared", [None, 0])
def test_an_encoder_with_its_padding_mask_is_not(
    declared: int | None, tmp_path: Path
) -> None:
    model = Model(shows_real, padding=declared)
    assert not found(model, tmp_path, masked, batch=padded)


def test_a_padding_mask_upside_down_is_named_as_that(tmp_path: Path) -> None:
    model = Model(lambda ids: ~shows_real(ids))
    assert "check.mask_sign" in found(model, tmp_path, masked, batch=padded)


def test_a_decoder_padded_at_the_right_sees_none_of_it(tmp_path: Path) -> None:
    assert not found(Model(causal()), tmp_path, next_real_token, batch=padded)


def test_a_decoder_padded_at_the_left_sees_it(tmp_path: Path) -> None:
    seen = found(Model(causal()), tmp_path, next_real_token, batch=padded_left)
    assert PADDING in seen


def hides_left(ids: Tensor) -> Tensor:
    return causal() & (ids != 0)[:, None, None]


def test_rows_of_padding_may_see_nothing_where_they_do_not_count(
    tmp_path: Path,
) -> None:
    def last_ones(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.masked_fill(ids == 0, IGNORED)
        first = labels[:, :-1] == IGNORED  # the row before the first token sees nothing
        z = model(ids)[:, :-1]
        return F.cross_entropy(
            z.flatten(0, 1), labels[:, 1:].masked_fill(first, IGNORED).flatten()
        )

    assert not found(Model(hides_left), tmp_path, last_ones, batch=padded_left)


def test_a_row_that_counts_and_sees_nothing_is_named(tmp_path: Path) -> None:
    def all_of_them(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())

    seen = found(Model(hides_left), tmp_path, all_of_them, batch=padded_left)[ROW]
    blind = sum(int((~real(ids)[:, :-1]).sum()) for ids in (text(0),))
    assert seen.severity == "error" and 0 < seen.params["rows"] <= blind + ROWS  # type: ignore[operator]


def test_the_row_before_the_first_token_may_predict_it_from_nothing(
    tmp_path: Path,
) -> None:
    seen = found(Model(hides_left), tmp_path, next_real_token, batch=padded_left)
    assert not seen


def test_dropout_of_a_rows_only_weight_is_no_row_without_keys(tmp_path: Path) -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        scores = (q @ k.mT).masked_fill(~mask, -1e9)
        out: Tensor = F.dropout(scores.softmax(-1), 0.7) @ v
        return out

    def all_of_them(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())

    assert not found(Model(causal(), attend=dropping), tmp_path, all_of_them, steps=4)


def test_padding_that_a_row_sees_alone_is_no_row_without_keys(tmp_path: Path) -> None:
    def sees_itself(ids: Tensor) -> Tensor:
        return hides_left(ids) | torch.eye(LENGTH, dtype=torch.bool)

    assert not found(Model(sees_itself), tmp_path, next_real_token, batch=padded_left)


IDS = {
    "no padding": text(0),
    "one length": F.pad(text(0)[:, :8], (0, 4)),
    "one row": padded(0)[2:3],
    "an end token": text(0).masked_fill(torch.arange(LENGTH) == LENGTH - 1, 0),
    "found elsewhere": padded(0).masked_fill(torch.arange(LENGTH) == 1, 0),
    "half of it other tokens": text(0).masked_fill(torch.arange(LENGTH) % 2 == 0, 0),
}


@pytest.mark.parametrize("case", IDS)
def test_what_may_be_text_is_not_taken_for_padding(case: str) -> None:
    assert not padded_BT(IDS[case], declared=None).any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_found_by_what_it_looks_like(side: str) -> None:
    ids = padded(0) if side == "right" else padded_left(0)
    assert torch.equal(padded_BT(ids, declared=None), ids == 0)


def test_declared_padding_is_padding_at_the_ends_alone() -> None:
    ids = torch.tensor([[0, 5, 4, 6, 0, 0]])
    expected: Any = [[True, False, False, False, True, True]]
    assert padded_BT(ids, declared=0).tolist() == expected


@pytest.mark.parametrize("ids", [[1, 5, 0, 6, 0, 0], [1, 5, 2, 6, 3, 0]])
def test_a_declared_id_that_may_be_text_is_not_padding(ids: list[int]) -> None:
    assert not padded_BT(torch.tensor([ids]), declared=0).any()
