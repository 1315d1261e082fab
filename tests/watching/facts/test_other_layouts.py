"""The same mistakes in other layouts, and what only looks like one of them.

Axes, in this file:  B sequence · T token · C channel.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.watching.facts.loops import LM, B, D, T, V, next_loss, plain
from tests.watching.facts.loops import found as violated
from tests.watching.facts.training import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Model,
    causal,
    found,
    text,
)

SHIFT, ROWS, AUXILIARY = (
    "check.labels_shift",
    "check.rows_mixed",
    "check.auxiliary_detached",
)
PLACES, ORDER, ANGLES = (
    "check.positions",
    "check.no_positions",
    "check.rotary_precision",
)
EXAMPLES, PADDING = "check.influence_examples", "check.influence_padding"
DROPS, BLIND, EVAL = "check.dropout_in_eval", "check.masked_row", "check.eval_mode"


# Losses.


def backwards(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


def logits_turned(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)[:, :-1].transpose(0, 1)
    return F.cross_entropy(z.reshape(-1, V), ids[:, 1:].reshape(-1))


def logits_permuted(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids).permute(1, 0, 2)[:-1]
    return F.cross_entropy(z.reshape(-1, V), ids[:, 1:].reshape(-1))


def targets_turned(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)[:, :-1]
    return F.cross_entropy(z.reshape(-1, V), ids[:, 1:].T.reshape(-1))


def both_turned(model: nn.Module, ids: Tensor) -> Tensor:
    z = model(ids)[:, :-1].transpose(0, 1)
    return F.cross_entropy(z.reshape(-1, V), ids[:, 1:].T.reshape(-1))


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (backwards, SHIFT),
        (logits_turned, ROWS),
        (logits_permuted, ROWS),
        (targets_turned, ROWS),
    ],
)
def test_a_loss_in_another_order_is_named(step: Any, code: str, tmp_path: Path) -> None:
    assert violated(plain(step), LM(), tmp_path) == {code: 0}


def test_both_may_be_turned(tmp_path: Path) -> None:
    assert violated(plain(both_turned), LM(), tmp_path) == {}


class PositionsFirst(LM):
    """Reads (B, T), and puts out (T, B, V), as recurrent models do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(0, 1)


def test_an_output_with_positions_first_is_compared_as_it_is(tmp_path: Path) -> None:
    def right(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:-1]
        return F.cross_entropy(z.reshape(-1, V), ids.T[1:].reshape(-1))

    def wrong(model: nn.Module, ids: Tensor) -> Tensor:
        z = model(ids)[:-1]
        return F.cross_entropy(z.reshape(-1, V), ids[:, 1:].reshape(-1))

    (tmp_path / "right").mkdir()
    assert violated(plain(right), PositionsFirst(), tmp_path / "right") == {}
    assert violated(plain(wrong), PositionsFirst(), tmp_path) == {ROWS: 0}


class Translator(nn.Module):
    """An encoder, and a decoder that looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        one = nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True)
        two = nn.TransformerDecoderLayer(D, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(two, 2)
        self.head = nn.Linear(D, V)

    def _embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return out

    def forward(self, ids: Tensor, answer: Tensor) -> Tensor:
        memory = self.encoder(self._embedded(ids))
        mask = nn.Transformer.generate_square_subsequent_mask(answer.shape[1])
        x = self.decoder(self._embedded(answer), memory, tgt_mask=mask)
        out: Tensor = self.head(x)
        return out


def answered(shift: int) -> Any:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        answer = ids.flip(1)
        given = F.pad(answer, (shift, 0), value=1)[:, : answer.shape[1]]
        return F.cross_entropy(model(ids, given).flatten(0, 1), answer.flatten())

    return step


def test_a_decoder_that_is_fed_its_labels_is_named(tmp_path: Path) -> None:
    assert SHIFT in violated(plain(answered(0)), Translator(), tmp_path)


def test_a_decoder_that_is_fed_the_token_before_is_right(tmp_path: Path) -> None:
    assert violated(plain(answered(1)), Translator(), tmp_path) == {}


def test_an_answer_may_be_the_question(tmp_path: Path) -> None:
    """What the encoder reads is not what the decoder has just read."""

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        given = F.pad(ids, (1, 0), value=1)[:, : ids.shape[1]]
        noised = torch.where(torch.rand(given.shape) < 0.3, 0, given)
        return F.cross_entropy(model(ids, noised).flatten(0, 1), ids.flatten())

    assert violated(plain(step), Translator(), tmp_path) == {}


class Regularised(LM):
    def __init__(self, *, graded: bool) -> None:
        super().__init__()
        self.graded = graded

    def forward(self, ids: Tensor) -> Any:
        z = super().forward(ids)
        with torch.set_grad_enabled(self.graded):
            size = z.square().mean()
        return z, size


@pytest.mark.parametrize("graded", [False, True])
def test_a_term_without_a_graph_in_the_output_is_named(
    graded: bool, tmp_path: Path
) -> None:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        z, size = model(ids)
        return next_loss(z, ids) + 0.1 * size

    expected = {} if graded else {AUXILIARY: 1}
    assert violated(plain(step), Regularised(graded=graded), tmp_path) == expected


def test_a_number_in_the_output_may_be_for_the_log(tmp_path: Path) -> None:
    def step(model: nn.Module, ids: Tensor) -> Tensor:
        z, _ = model(ids)
        return next_loss(z, ids) + 0.01

    assert violated(plain(step), Regularised(graded=False), tmp_path) == {}


# Positions.


class Clamped(Model):
    def __init__(self, rows: int) -> None:
        super().__init__(causal())
        self.positions = nn.Embedding(rows, WIDTH)

    def embedded(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        places = places.clamp(max=self.positions.num_embeddings - 1)
        out: Tensor = self.tokens(ids) + self.positions(places)
        return out


@pytest.mark.parametrize("rows", [LENGTH // 2, LENGTH, 64])
def test_tokens_beyond_the_table_are_named(rows: int, tmp_path: Path) -> None:
    seen = found(Clamped(rows), tmp_path)
    assert (PLACES in seen) == (rows < LENGTH)
    if rows < LENGTH:
        assert seen[PLACES].params["tokens"] == LENGTH - rows


class Turned(Model):
    """Rotary angles along an axis of (B, H, T, D); none where it is None."""

    def __init__(self, axis: int | None) -> None:
        super().__init__(causal(), attend=self._attend)
        self.axis = axis
        self.rotary = nn.Identity()

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids)
        return out

    def _turned(self, x: Tensor) -> Tensor:
        shape = [1, 1, 1, x.shape[-1] // 2]
        axis = 2 if self.axis is None else self.axis
        shape[axis] = x.shape[axis]
        place = torch.arange(x.shape[axis]).float()
        rates = 1e2 ** -torch.linspace(0, 1, x.shape[-1] // 2)
        angle = (place[:, None] * rates).view(shape)
        if self.axis is None:  # computed, and not used
            return x
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = self._turned(q), self._turned(k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def few_words(step: int) -> Tensor:
    return text(step) % 5 + 2


@pytest.mark.parametrize("axis", [1, 2, None])
def test_angles_along_the_heads_are_named(axis: int | None, tmp_path: Path) -> None:
    seen = found(Turned(axis), tmp_path, batch=few_words, steps=3)
    assert (ORDER in seen) == (axis != 2)


class Biased(Turned):
    """Distances are added to the scores: nothing turns queries and keys."""

    def __init__(self) -> None:
        super().__init__(None)
        place = torch.arange(LENGTH)
        self.slopes = nn.Parameter(torch.tensor(0.5))
        self.distance = -(place[:, None] - place).abs().float()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        bias = (self.slopes * self.distance).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Starting(Model):
    """Learnt positions that begin at zero."""

    def __init__(self) -> None:
        super().__init__(causal())
        nn.init.zeros_(self.positions.weight)


@pytest.mark.parametrize("make", [Biased, Starting])
def test_positions_of_other_kinds_reach_attention(make: Any, tmp_path: Path) -> None:
    assert ORDER not in found(make(), tmp_path, batch=few_words, steps=3)


class Bag(Model):
    def __init__(self) -> None:
        super().__init__(causal())
        del self.positions

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids)
        return out


def test_a_model_without_positions_may_be_meant(tmp_path: Path) -> None:
    assert ORDER not in found(Bag(), tmp_path, batch=few_words, steps=3)


class Frequencies(Model):
    def __init__(self, dtype: torch.dtype, *, table: bool) -> None:
        super().__init__(causal())
        rates = 1e4 ** -torch.linspace(0, 1, 8)
        if table:
            rates = torch.outer(torch.arange(LENGTH).float(), rates).cos()
        self.register_buffer("cos" if table else "inv_freq", rates.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table", [False, True])
def test_stored_frequencies_in_half_precision_are_named(
    dtype: torch.dtype, table: bool, tmp_path: Path
) -> None:
    wrong = not table and dtype != torch.float32
    assert (ANGLES in found(Frequencies(dtype, table=table), tmp_path)) == wrong


# Whole sequences: classification.


class Classifier(nn.Module):
    """One output for each sequence, of torch's encoder."""

    def __init__(
        self, pool: str = "real", *, batch_first: bool = True, drop: Any = None
    ) -> None:
        super().__init__()
        self.pool, self.drop = pool, drop
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(64, D)
        layer = nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, 3)
        self.masks = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        if self.drop == "always":
            x = F.dropout(x, 0.2)
        if self.drop == "trained":
            x = F.dropout(x, 0.2, self.training)
        hidden = ids == 0 if self.masks and bool((ids == 0).any()) else None
        x = self.encoder(x, src_key_padding_mask=hidden)
        real = torch.ones_like(ids) if self.pool == "all" else (ids != 0).long()
        mean = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return self.head(mean)


def classified(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), ids[:, 0] % 3)


def padded(step: int) -> Tensor:
    ids = text(step, rows=B, length=T).clamp(min=2)
    rng = torch.Generator().manual_seed(step)
    ends = torch.randint(6, T - 2, (len(ids), 1), generator=rng)
    return ids.masked_fill(torch.arange(T) >= ends, 0)


def unpadded(step: int) -> Tensor:
    return text(step, rows=B, length=T)


def tried(model: nn.Module, tmp_path: Path, batch: Any) -> set[str]:
    given = {"batch": batch, "steps": 4, "checks": "active"}
    return set(found(model, tmp_path, classified, **given))


@pytest.mark.parametrize("pool", ["real", "all"])
def test_a_mean_over_padding_is_named(pool: str, tmp_path: Path) -> None:
    expected = {PADDING} if pool == "all" else set()
    assert tried(Classifier(pool), tmp_path, padded) == expected


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_along_the_batch_is_named(batch_first: bool, tmp_path: Path) -> None:
    model = Classifier(batch_first=batch_first)
    expected = set() if batch_first else {EXAMPLES}
    assert tried(model, tmp_path, unpadded) == expected


class Sideways(Classifier):
    """Positions first inside, as torch's encoder wants it: rows are given so."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


def test_a_model_may_turn_its_batch_itself(tmp_path: Path) -> None:
    assert tried(Sideways(batch_first=False), tmp_path, unpadded) == set()


@pytest.mark.parametrize("drop", ["always", "trained"])
def test_dropout_that_is_not_told_the_mode_is_named(drop: str, tmp_path: Path) -> None:
    seen = tried(Classifier(drop=drop), tmp_path, unpadded)
    assert (DROPS in seen) == (drop == "always")


class Emptied(Model):
    """One output for each sequence; padding is hidden with a large number."""

    def __init__(self) -> None:
        super().__init__(self._mask, attend=_written)
        self.head = nn.Linear(WIDTH, 3)

    def _mask(self, ids: Tensor) -> Tensor:
        return (ids != 0)[:, None, None].expand(-1, 1, ids.shape[1], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = super().embedded(ids)
        for block in self.blocks:
            x = block(x, self._mask(ids))
        return self.head(x[:, 0])


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    lowest = torch.finfo(q.dtype).min
    out: Tensor = (q @ k.mT).masked_fill(~mask, lowest).softmax(-1) @ v
    return out


@pytest.mark.parametrize("empty", [True, False])
def test_a_sequence_of_padding_alone_is_named(empty: bool, tmp_path: Path) -> None:
    def batch(step: int) -> Tensor:
        ids = text(step) % (VOCABULARY - 2) + 1
        ids[:, -3:] = 0
        if empty:
            ids[2] = 0
        return ids

    seen = found(Emptied(), tmp_path, classified, batch=batch)
    assert (BLIND in seen) == empty


class Wrapper(nn.Module):
    """Holds the model, and passes on what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


@pytest.mark.parametrize("training", [True, False])
def test_a_wrapper_does_not_hide_the_mode(training: bool, tmp_path: Path) -> None:
    inner = LM()
    inner.drop = nn.Dropout(0.1)
    model = Wrapper(inner)
    inner.train(training)
    loop = plain(lambda model, ids: next_loss(model(ids), ids))
    assert (EVAL in violated(loop, model, tmp_path)) == (not training)
