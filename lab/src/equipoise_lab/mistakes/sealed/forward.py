"""Mistakes in the forward pass: masks, axes, positions, modes, precision, influence."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import (
    BOS,
    EOS,
    IGNORED,
    MASK,
    PAD,
    STEPS,
    Attach,
    Decoder,
    batches,
    text,
)


class Translator(nn.Module):
    """Sequence to sequence with torch's own Transformer."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(32, 32)
        self.places = nn.Embedding(64, 32)
        self.transformer = nn.Transformer(32, 4, 1, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(self._in(source), self._in(target), tgt_mask=mask)
        return self.head(out)

    def _in(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))


def translation_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a text said backwards, teacher-forced after a first token."""
    ids = text(seed=step).clamp(min=3)
    labels = ids.flip(1)
    given = F.pad(labels, (1, 0), value=BOS)[:, :-1]
    return parts.token_loss(model(ids, given), labels)


@mistake("check.sees_target", source="pytorch forum: nn.Transformer without tgt_mask")
def a_decoder_of_torch_without_its_mask(wrong: bool, watch: Attach) -> None:
    model = Translator(causal=not wrong)
    parts.train(model, watch, translation_loss, data=range(STEPS))


@mistake(
    "check.sees_target",
    source="transformers: a mask of four axes is taken as it is",
    kind="transformers",
)
def a_ready_mask_that_hides_nothing(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        bias = torch.zeros(rows, 1, length, length)
        if not wrong:
            bias = bias.masked_fill(hidden, torch.finfo(bias.dtype).min)
        logits = model(input_ids=ids, attention_mask=bias).logits
        return parts.next_token_loss(logits, ids)

    parts.train(parts.llama(), watch, loss)


class Masked(nn.Module):
    """A masked language model of torch's encoder, given which tokens are hidden."""

    def __init__(self, *, batch_first: bool = True, placed: bool = True) -> None:
        super().__init__()
        self.placed = placed
        self.tokens = nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)

    def forward(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        with_place = self._with_place(x)
        x = with_place if self.placed else x
        return self.head(self.encoder(x, src_key_padding_mask=hidden))

    def _with_place(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])[:, None]
        rates = torch.exp(-math.log(1e4) * torch.arange(16) / 16)
        return x + torch.cat(((place * rates).sin(), (place * rates).cos()), -1)


@mistake(
    "check.mask_sign",
    "check.padding_attended",
    source="pytorch docs: True in a key padding mask means ignored",
)
def a_key_padding_mask_of_the_real_tokens(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        rng = torch.Generator().manual_seed(step)
        hidden = (torch.rand(ids.shape, generator=rng) < 0.3) & real
        logits = model(ids.masked_fill(hidden, MASK), real if wrong else ~real)
        return F.cross_entropy(logits[hidden], ids[hidden])

    parts.train(Masked(), watch, loss, data=range(STEPS))


def _masked_bert(model: nn.Module, step: int, *, flipped: bool = False) -> Tensor:
    ids, real = parts.padded(step)
    rng = torch.Generator().manual_seed(step)
    hidden = (torch.rand(ids.shape, generator=rng) < 0.3) & real
    attended = (~real if flipped else real).long()
    return model(
        input_ids=ids.masked_fill(hidden, MASK),
        attention_mask=attended,
        labels=ids.masked_fill(~hidden, IGNORED),
    ).loss


@mistake(
    "check.mask_sign",
    "check.padding_attended",
    source="forums: attention_mask = (ids == pad)",
    kind="transformers",
)
def an_attention_mask_of_the_padding(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return _masked_bert(model, step, flipped=wrong)

    parts.train(parts.bert(), watch, loss, data=range(STEPS))


@mistake(
    "check.padding_attended",
    source="transformers docs: left padding needs its attention mask",
    kind="transformers",
)
def left_padding_without_an_attention_mask(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step, left=True)
        place = (real.long().cumsum(1) - 1).clamp(min=0)
        mask = None if wrong else real.long()
        out = model(input_ids=ids, attention_mask=mask, position_ids=place)
        labels = ids.masked_fill(~real, IGNORED)
        return parts.token_loss(out.logits[:, :-1], labels[:, 1:])

    parts.train(parts.gpt2(), watch, loss, data=range(STEPS))


class Written(nn.Module):
    """Attention by hand, in the layout (B, T, H, D) or (B, H, T, D)."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (4, 8)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.mT / 8**0.5).softmax(self.axis)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


@mistake("check.softmax_axis", source="own: dim=1 of scores that have a head axis")
def a_softmax_over_the_heads(wrong: bool, watch: Attach) -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, 32, 4, 4)
            self.place = nn.Parameter(0.02 * torch.randn(16, 32))
            self.layers = nn.ModuleList(Written(1 if wrong else -1) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x).flatten(2).mT + self.place
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
            return self.head(x.mean(1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    parts.train(Pixels(), watch, loss, data=parts.every(parts.pictures))


@mistake(
    "check.positions",
    source="own: position ids of a wrong cumulative sum, all zero",
    kind="transformers",
)
def position_ids_that_are_all_zero(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1]).expand_as(ids)
        out = model(input_ids=ids, position_ids=place * 0 if wrong else place)
        return parts.next_token_loss(out.logits, ids)

    parts.train(parts.llama(), watch, loss)


@mistake(
    "check.positions", source="own: a table shorter than the text, hidden by a clamp"
)
def positions_beyond_their_table(wrong: bool, watch: Attach) -> None:
    class Clamped(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            last = self.positions.num_embeddings - 1
            place = torch.arange(ids.shape[1]).clamp(max=last)
            x = self.tokens(ids) + self.positions(place)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    parts.train(Clamped(length=8 if wrong else 64), watch)


class Turned(nn.Module):
    """Causal attention with rotary angles along a given axis of (B, H, T, D)."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def _turned(self, x: Tensor) -> Tensor:
        rates = 1e4 ** (-torch.arange(4) / 4)
        shape = [1, 1, 1, 4]
        shape[self.axis] = x.shape[self.axis]
        place = torch.arange(x.shape[self.axis]).float()
        angle = (place[:, None] * rates).view(shape)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (4, 8)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True
        )
        return self.out(out.transpose(1, 2).flatten(-2))


class Rotary(Decoder):
    """A decoder without a table of positions."""

    def __init__(self, axis: int = 2) -> None:
        super().__init__()
        del self.positions
        for block in self.blocks:
            block.attention = Turned(axis)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@mistake(
    "check.positions",
    "check.no_positions",
    source="own: the layouts (B, T, H, D) and (B, H, T, D) mistaken for each other",
)
def rotary_angles_along_the_heads(wrong: bool, watch: Attach) -> None:
    parts.train(Rotary(axis=1 if wrong else 2), watch)


@mistake("check.no_positions", source="forums: the result of the encoding is not used")
def an_encoding_of_positions_that_is_not_added(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(Masked(placed=not wrong), watch, loss, data=range(STEPS))


@mistake(
    "check.eval_mode",
    source="transformers docs: from_pretrained returns a model in evaluation mode",
    kind="transformers",
)
def fine_tuned_as_from_pretrained_returned_it(wrong: bool, watch: Attach) -> None:
    import tempfile

    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        parts.gpt2(dropout=0.1).save_pretrained(folder)
        model = GPT2LMHeadModel.from_pretrained(folder)
    if not wrong:
        model.train()
    parts.train(model, watch, parts.language_loss)


@mistake(
    "check.eval_mode", source="own: a validation that does not switch back to training"
)
def evaluation_mode_after_the_first_validation(wrong: bool, watch: Attach) -> None:
    model = Decoder(dropout=0.15)
    optimizer = torch.optim.RAdam(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 10 == 4:
            model.eval()
            with torch.no_grad():
                parts.own_loss(model, text(seed=999))
            if not wrong:
                model.train()


@mistake(
    "check.dropout_in_eval",
    source="transformers#33844 (TrainCheck): attention's dropout is a fixed number",
)
def dropout_of_attention_that_ignores_the_mode(wrong: bool, watch: Attach) -> None:
    class Dropping(Written):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                one.unflatten(-1, (4, 8)).transpose(1, 2)
                for one in self.qkv(x).chunk(3, -1)
            )
            share = 0.2 if wrong or self.training else 0.0
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=share, is_causal=True
            )
            return self.out(out.transpose(1, 2).flatten(-2))

    model = Decoder()
    for block in model.blocks:
        block.attention = Dropping(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                parts.own_loss(model, text(seed=999))
            model.train()


@mistake(
    "check.dropout_in_eval",
    source="forums: F.dropout drops in evaluation too unless it is told",
)
def functional_dropout_without_the_mode(wrong: bool, watch: Attach) -> None:
    class Functional(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            x = F.dropout(x, 0.2) if wrong else F.dropout(x, 0.2, self.training)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    model = Functional()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        model.train()
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 4 == 3:
            model.eval()
            with torch.inference_mode():
                parts.own_loss(model, text(seed=999))


@mistake(
    "check.rotary_precision",
    source="transformers#29285: the whole model, tables too, cast to bf16",
    kind="transformers",
)
def rotary_frequencies_cast_with_the_model(wrong: bool, watch: Attach) -> None:
    model = parts.llama().to(torch.bfloat16)
    if not wrong:
        model.model.rotary_emb = parts.llama().model.rotary_emb

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return parts.next_token_loss(model(input_ids=ids).logits.float(), ids)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts.train(model, watch, loss, optimizer=optimizer)


@mistake(
    "check.autocast_inactive", source="own: autocast for a device that is not here"
)
def autocast_for_another_device(wrong: bool, watch: Attach) -> None:
    device = "cuda" if wrong else "cpu"

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return parts.own_loss(model, ids)

    parts.train(Decoder(), watch, loss)


@mistake(
    "check.masked_row",
    source="pytorch#41508, own: an empty text in a batch of classification",
    kind="transformers",
)
def a_row_of_a_batch_without_tokens(wrong: bool, watch: Attach) -> None:
    from transformers import BertForSequenceClassification

    config = parts.bert_config(attn_implementation="eager")
    model = BertForSequenceClassification(config)

    def batch(step: int) -> dict[str, Tensor]:
        ids, labels = parts.labelled(step)
        mask = torch.ones_like(ids)
        mask[3] = 0
        keep = slice(None) if wrong else [i for i in range(len(ids)) if i != 3]
        return {
            "input_ids": ids[keep],
            "attention_mask": mask[keep],
            "labels": labels[keep],
        }

    parts.train(model, watch, lambda m, given: m(**given).loss, data=parts.every(batch))


@mistake(
    "check.influence_future",
    "check.sees_target",
    source="own: a convolution padded at both ends in a causal model",
)
def a_convolution_that_sees_the_next_token(wrong: bool, watch: Attach) -> None:
    class Convolved(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv1d(32, 32, 3, groups=32)

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            x = x + self.mix(F.pad(x.mT, (1, 1) if wrong else (2, 0))).mT
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    parts.train(Convolved(), watch)


@mistake(
    "check.influence_future",
    source="own: activations normalised over the tokens instead of the channels",
)
def a_norm_over_the_tokens(wrong: bool, watch: Attach) -> None:
    class OverTokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            axis = 1 if wrong else 2
            centred = x - x.mean(axis, keepdim=True)
            spread = centred.square().mean(axis, keepdim=True)
            return centred * (spread + 1e-5).rsqrt() * self.weight

    model = Decoder()
    model.norm = OverTokens()
    parts.train(model, watch)


@mistake(
    "check.influence_examples",
    source="pytorch forum: batch-first data, and batch_first left at False",
)
def attention_across_the_batch(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, labels = parts.corrupted(step)
        return parts.token_loss(model(ids), labels)

    parts.train(Masked(batch_first=not wrong), watch, loss, data=range(STEPS))


@mistake(
    "check.influence_documents",
    source="transformers#46634: a mask of ones lets packed documents see each other",
    kind="transformers",
)
def packed_documents_under_a_mask_of_ones(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(4, 24, seed=step).clamp(min=3)
        ids[:, 11] = EOS
        place = torch.cat((torch.arange(12), torch.arange(12))).expand_as(ids)
        labels = ids.clone()
        labels[:, 12] = IGNORED
        document = torch.arange(24) // 12
        seen = (document[:, None] == document) & torch.ones(24, 24).tril().bool()
        mask = torch.ones_like(ids) if wrong else seen.expand(4, 1, 24, 24)
        out = model(input_ids=ids, position_ids=place, attention_mask=mask)
        return parts.token_loss(out.logits[:, :-1], labels[:, 1:])

    parts.train(parts.qwen(), watch, loss, data=range(STEPS))


@mistake(
    "check.influence_padding",
    "check.padding_attended",
    source="own: the mean over all positions, padding among them",
)
def a_mean_over_padding(wrong: bool, watch: Attach) -> None:
    class Pooled(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 2)

        def forward(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = self._with_place(self.tokens(ids))
            x = self.encoder(x, src_key_padding_mask=ids == PAD)
            if wrong:
                return self.head(x.mean(1))
            real = (ids != PAD)[..., None]
            return self.head((x * real).sum(1) / real.sum(1))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids, _ = parts.padded(step)
        return F.cross_entropy(model(ids), (ids[:, 0] < ids[:, 1]).long())

    parts.train(Pooled(), watch, loss, data=range(STEPS))
