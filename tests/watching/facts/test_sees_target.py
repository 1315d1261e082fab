"""A counted position that sees its target is named; what only looks like it is not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.watching.facts.training import (
    IGNORED,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    Model,
    causal,
    found,
    fused,
    next_token,
    text,
)

SEES, SIGN = "check.sees_target", "check.mask_sign"
MASK = 1


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    out: Tensor = scores.softmax(-1) @ v
    return out


def hidden_afterwards(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the weights after the softmax, and share them out again."""
    assert mask is not None
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) * mask
    out: Tensor = (weights / weights.sum(-1, keepdim=True)) @ v
    return out


@pytest.mark.parametrize("attend", [None, written])
@pytest.mark.parametrize("reach", [1, LENGTH])
def test_a_row_that_sees_the_next_token_is_named(
    reach: int, attend: object, tmp_path: Path
) -> None:
    shows = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(reach)
    model = Model(shows, **({"attend": attend} if attend else {}))  # type: ignore[arg-type]
    seen = found(model, tmp_path)[SEES]
    assert seen.severity == "error" and seen.site == "blocks.0.attention"
    assert seen.params["sites"] == 2 and seen.step == 0
    assert seen.params["rows"] == seen.params["of"] == ROWS * (LENGTH - 1)


@pytest.mark.parametrize("attend", [None, written, hidden_afterwards])
def test_a_causal_mask_shows_no_target(attend: object, tmp_path: Path) -> None:
    model = Model(causal(), **({"attend": attend} if attend else {}))  # type: ignore[arg-type]
    assert not found(model, tmp_path)


def test_two_tokens_ahead_is_a_target_where_the_loss_asks_for_it(
    tmp_path: Path,
) -> None:
    def two_ahead(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:, :-2]
        return F.cross_entropy(z.flatten(0, 1), ids[:, 2:].flatten())

    wide = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)
    assert SEES in found(Model(wide), tmp_path, two_ahead)
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)
    assert not found(Model(near), tmp_path, two_ahead)


def test_a_mask_upside_down_has_a_code_of_its_own(tmp_path: Path) -> None:
    model = Model(~causal() | torch.eye(LENGTH, dtype=torch.bool))
    seen = found(model, tmp_path)
    assert SIGN in seen and SEES not in seen


def test_a_model_that_predicts_backwards_is_none(tmp_path: Path) -> None:
    def last_token(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:, 1:]
        return F.cross_entropy(z.flatten(0, 1), ids[:, :-1].flatten())

    assert not found(Model(causal().mT), tmp_path, last_token)


def test_a_prefix_that_sees_itself_is_not_asked_for_its_own_tokens(
    tmp_path: Path,
) -> None:
    shows = causal()
    shows[:, :6] = True

    def after_the_prefix(model: nn.Module, ids: Tensor) -> Tensor:
        labels = ids.masked_fill(torch.arange(LENGTH) < 6, IGNORED)
        z = model(ids)[:, :-1]
        return F.cross_entropy(z.flatten(0, 1), labels[:, 1:].flatten())

    assert not found(Model(shows), tmp_path, after_the_prefix)
    assert SEES in found(Model(), tmp_path, after_the_prefix)
    assert SEES in found(Model(shows), tmp_path)  # the prefix counts as well


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_masked_inputs_hold_no_target(ahead: int, kept: float, tmp_path: Path) -> None:
    """BERT's rows count where they are masked, Dream's one row before."""

    def masked(model: nn.Module, ids: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(int(ids.sum()))
        chosen = torch.rand(ids.shape, generator=rng) < 0.4
        hidden = chosen & (torch.rand(ids.shape, generator=rng) >= kept)
        z = model(ids.masked_fill(hidden, MASK))
        labels = ids.masked_fill(~chosen, IGNORED)
        z, labels = z[:, : LENGTH - ahead], labels[:, ahead:]
        return F.cross_entropy(z.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    assert not found(Model(), tmp_path, masked)


def test_classes_of_tokens_are_no_targets_among_the_inputs(tmp_path: Path) -> None:
    def tags(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), (ids * 7 % 11).flatten())

    assert not found(Model(), tmp_path, tags)


def test_a_teachers_distribution_is_no_target(tmp_path: Path) -> None:
    def distilled(model: nn.Module, ids: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(3)
        p = torch.randn(*ids.shape, VOCABULARY, generator=rng).softmax(-1)
        return F.cross_entropy(model(ids).flatten(0, 1), p.flatten(0, 1))

    assert not found(Model(), tmp_path, distilled)


class Translation(nn.Module):
    """An encoder that sees all, and a decoder that sees what was translated."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.mask = mask
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([Block(crossed=True), Block(crossed=True)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, given: Tensor, ids: Tensor) -> Tensor:
        x = self.tokens(given)
        for block in self.encoder:
            x = block(x)
        y = self.tokens(ids)
        for block in self.decoder:
            y = block(y, self.mask, x)
        out: Tensor = self.head(y)
        return out


def copied(model: nn.Module, ids: Tensor) -> Tensor:
    """The answer is the question, as in a denoising model without noise."""
    shifted = F.pad(ids, (1, 0), value=MASK)[:, :-1]
    z = model(ids, shifted)
    return F.cross_entropy(z.flatten(0, 1), ids.flatten())


def test_an_encoder_may_see_what_its_decoder_is_to_say(tmp_path: Path) -> None:
    assert not found(Translation(causal()), tmp_path, copied)


def test_a_decoder_of_a_translation_without_a_mask_is_named(tmp_path: Path) -> None:
    seen = found(Translation(None), tmp_path, copied)[SEES]
    assert seen.site == "decoder.0.attention" and seen.params["sites"] == 2


@pytest.mark.parametrize("early", [False, True])
def test_a_decoder_whose_layers_were_all_dropped_is_not_its_encoder(
    early: bool, tmp_path: Path
) -> None:
    """LayerDrop: at some steps no layer of the decoder is called."""

    class Dropped(Translation):
        def forward(self, given: Tensor, ids: Tensor) -> Tensor:
            y = self.tokens(ids) if early else None
            x = self.tokens(given)
            for block in self.encoder:
                x = block(x)
            y = self.tokens(ids) if y is None else y
            out: Tensor = self.head(y)
            return out

    assert not found(Dropped(causal()), tmp_path, asked_of_itself)
    assert not found(Dropped(causal()), tmp_path, copied)


def asked_of_itself(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids, ids)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())


def test_a_later_pass_of_the_step_says_nothing_of_the_first(tmp_path: Path) -> None:
    """Another objective sees all it likes, and trains on other logits."""

    def then_all(model: nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(model, Model)
        model.mask = causal()
        loss = next_token(model, ids)
        model.mask = None
        return loss + 0 * model(ids).sum()

    assert not found(Model(), tmp_path, then_all)


class CrossAttention(Attention):
    """Attends to a memory that it holds, not to what it is given."""

    memory: Tensor

    def forward(
        self, x: Tensor, mask: Tensor | None = None, other: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            f(z).unflatten(-1, (2, -1)).transpose(1, 2)
            for f, z in (
                (self.q_proj, x),
                (self.k_proj, self.memory),
                (self.v_proj, self.memory),
            )
        )
        out: Tensor = self.o_proj(fused(q, k, v, None).transpose(1, 2).flatten(2))
        return out


def test_a_memory_as_long_as_the_text_is_another_sequence(tmp_path: Path) -> None:
    model = Model(causal())
    model.blocks[1].attention = crossing = CrossAttention()
    crossing.memory = torch.randn(ROWS, LENGTH, WIDTH)
    assert not found(model, tmp_path)


class Autoencoder(Model):
    """An encoder over the whole text, one vector, and a causal decoder of it."""

    def __init__(self) -> None:
        super().__init__(causal())
        self.before = nn.ModuleList([Block(), Block()])

    def embedded(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        y = x
        for block in self.before:
            y = block(y)
        return x + y.mean(1, keepdim=True)


def test_a_bottleneck_of_the_whole_text_is_no_leak_of_attention(
    tmp_path: Path,
) -> None:
    assert not found(Autoencoder(), tmp_path)


def test_documents_in_a_pack_hide_more_than_a_causal_mask(tmp_path: Path) -> None:
    document = torch.tensor([0] * 5 + [1] * 7)
    packed = causal() & (document[:, None] == document)
    assert not found(Model(packed), tmp_path)


def test_repeated_text_is_not_decided(tmp_path: Path) -> None:
    """Where every token is the same, no shift is told from another."""

    def alike(step: int) -> Tensor:
        return torch.full((ROWS, LENGTH), 5)

    assert not found(Model(), tmp_path, batch=alike)


def test_the_loss_inside_a_model_that_returns_no_logits_is_read(
    tmp_path: Path,
) -> None:
    class WithLoss(Model):
        def forward(self, ids: Tensor) -> Tensor:
            z = super().forward(ids)[:, :-1]
            return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten())

    assert SEES in found(WithLoss(), tmp_path, lambda model, ids: model(ids))
    assert not found(WithLoss(causal()), tmp_path, lambda model, ids: model(ids))


def test_what_is_mended_is_withdrawn(tmp_path: Path) -> None:
    model = Model()

    def mended(one: nn.Module, ids: Tensor) -> Tensor:
        loss = next_token(one, ids)
        model.mask = causal()
        return loss

    assert SEES in found(model, tmp_path, mended, steps=1)
    model.mask = None
    assert not found(model, tmp_path, mended, steps=2)


def test_long_sequences_are_read_at_some_rows(tmp_path: Path) -> None:
    class Long(Model):
        def __init__(self, mask: Tensor | None = None) -> None:
            super().__init__(mask)
            del self.positions

        def embedded(self, ids: Tensor) -> Tensor:
            out: Tensor = self.tokens(ids)
            return out

    def long(step: int) -> Tensor:
        return text(step, rows=2, length=200)

    seen = found(Long(), tmp_path, batch=long)[SEES]
    assert 0 < seen.params["rows"] <= 2 * 64  # type: ignore[operator]
    assert not found(Long(causal(200)), tmp_path, batch=long)
