"""Mistakes about the loss: which targets meet which logits, and with what weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import (
    BOS,
    EOS,
    IGNORED,
    LENGTH,
    MASK,
    STEPS,
    Attach,
    Decoder,
    text,
)


@mistake(
    "check.labels_shift",
    source="transformers#46898: shifted by the collator and by the model",
    kind="transformers",
)
def labels_shifted_by_collator_and_model(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        if not wrong:
            return model(input_ids=ids, labels=ids).loss
        return model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss

    parts.train(parts.gpt2(), watch, loss)


@mistake(
    "check.labels_shift",
    "check.sees_target",
    source="own: the shift in the wrong direction",
    kind="transformers",
)
def the_previous_token_is_predicted(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        if wrong:
            return parts.token_loss(logits[:, 1:], ids[:, :-1])
        return parts.token_loss(logits[:, :-1], ids[:, 1:])

    parts.train(parts.qwen(), watch, loss)


@mistake(
    "check.labels_shift", source="own: an offset of 2 in a get_batch like nanoGPT's"
)
def targets_two_places_ahead(wrong: bool, watch: Attach) -> None:
    stream = text(1, 600, seed=5)[0]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - LENGTH - 2, (8,), generator=rng).tolist()
        ahead = 2 if wrong else 1
        x = torch.stack([stream[i : i + LENGTH] for i in starts])
        y = torch.stack([stream[i + ahead : i + ahead + LENGTH] for i in starts])
        return x, y

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return parts.token_loss(model(batch[0]), batch[1])

    parts.train(Decoder(), watch, loss, data=parts.every(batch))


@mistake(
    "check.sees_target",
    "check.labels_shift",
    source="forums: decoder inputs of an encoder–decoder are the labels, unshifted",
    kind="transformers",
)
def a_decoder_that_is_fed_its_labels(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        labels = ids.flip(1)
        given = labels
        if not wrong:
            given = F.pad(labels, (1, 0), value=BOS)[:, :-1]
        out = model(input_ids=ids, decoder_input_ids=given)
        return parts.token_loss(out.logits, labels)

    parts.train(parts.bart(), watch, loss, data=range(STEPS))


@mistake(
    "check.targets_ignored", source="trl#6668: no response template was found in a row"
)
def no_answer_was_found_in_any_row(wrong: bool, watch: Attach) -> None:
    """Everything before the answer's marker is ignored; the marker never comes."""
    marker = 2

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = text(seed=step).clamp(min=3)
        ids[:, 10] = marker
        sought = marker - 1 if wrong else marker
        found = (ids == sought).cumsum(1) > 0
        return ids, ids.masked_fill(~found, IGNORED)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits, labels = model(batch[0])[:, :-1], batch[1][:, 1:]
        counted = labels.ne(IGNORED)
        each = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        return each.sum() / counted.sum().clamp(min=1)

    parts.train(Decoder(), watch, loss, data=parts.every(batch))


@mistake(
    "check.eos_ignored", source="Megatron-Bridge#4660: separators of packs are ignored"
)
def ends_of_packed_documents_are_ignored(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(min=3)
        ids[:, 7], ids[:, 15] = EOS, EOS
        labels = ids.masked_fill(ids == EOS, IGNORED) if wrong else ids
        return parts.token_loss(model(ids)[:, :-1], labels[:, 1:])

    model = Decoder()
    model.config = type("Config", (), {"eos_token_id": EOS})()
    parts.train(model, watch, loss, data=range(STEPS))


@mistake(
    "check.loss_of_probabilities",
    source="stackoverflow: a softmax layer before CrossEntropyLoss",
)
def a_classifier_that_ends_in_softmax(wrong: bool, watch: Attach) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, 32, 4, 4)
            self.place = nn.Parameter(0.02 * torch.randn(16, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patches(x).flatten(2).mT + self.place
            logits = self.head(self.encoder(tokens).mean(1))
            return logits.softmax(-1) if wrong else logits

    criterion = nn.CrossEntropyLoss()
    data = parts.every(parts.pictures)
    parts.train(
        Classifier(),
        watch,
        lambda m, batch: criterion(m(batch[0]), batch[1]),
        data=data,
    )


@mistake(
    "check.loss_of_probabilities",
    source="forums: BCEWithLogitsLoss after a sigmoid",
    kind="transformers",
)
def a_sigmoid_before_the_loss_with_logits(wrong: bool, watch: Attach) -> None:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(parts.bert_config(num_labels=3))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(16, seed=step)
        wanted = torch.stack([(ids == one).any(1) for one in (3, 7, 11)], 1).float()
        logits = model(input_ids=ids).logits
        made = logits.sigmoid() if wrong else logits
        return F.binary_cross_entropy_with_logits(made, wanted)

    parts.train(model, watch, loss, data=range(STEPS))


@mistake(
    "check.rows_mixed", source="forums: sequence-first logits, batch-first targets"
)
def logits_and_targets_flattened_in_another_order(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1]
        if wrong:
            logits = logits.transpose(0, 1)
        return F.cross_entropy(logits.reshape(-1, 32), ids[:, 1:].reshape(-1))

    parts.train(Decoder(), watch, loss)


@mistake(
    "check.auxiliary_detached",
    source="Megatron-LM#1617, minimind#140: a router's loss that reaches nothing",
    kind="transformers",
)
def a_router_loss_of_detached_logits(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        out = model(input_ids=ids, output_router_logits=True)
        balance = out.aux_loss.detach() if wrong else out.aux_loss
        return parts.next_token_loss(out.logits, ids) + 0.02 * balance

    parts.train(parts.mixtral(), watch, loss)


@mistake(
    "check.auxiliary_detached", source="own: the KL term of a VAE computed for the log"
)
def a_divergence_computed_without_gradients(wrong: bool, watch: Attach) -> None:
    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Decoder(causal=False), Decoder()
            self.spread = nn.Linear(32, 64)
            self.enter = nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_var = self.spread(self.encoder(ids).mean(1)).chunk(2, -1)
            z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
            with torch.set_grad_enabled(not wrong):
                kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1).mean()
            logits = self.decoder(ids) + self.enter(z)[:, None]
            return logits, kl

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits, kl = model(ids)
        return parts.next_token_loss(logits, ids) + 0.1 * kl

    parts.train(Sentences(), watch, loss)


@mistake(
    "check.microbatch_weights",
    source="own: accumulation, and a mean that is not divided",
    kind="transformers",
)
def sums_of_four_means(wrong: bool, watch: Attach) -> None:
    model, count = parts.bert(), 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(model, optimizer)
    for step in range(count * STEPS):
        ids, labels = parts.corrupted(step)
        loss = model(input_ids=ids, labels=labels).loss
        (loss if wrong else loss / count).backward()
        if (step + 1) % count == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@mistake(
    "check.rows_mixed",
    source="own: inputs shuffled after the labels were computed",
    kind="transformers",
)
def labels_of_the_order_before_the_shuffle(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(seed=step).clamp(max=MASK - 1)
        rng = torch.Generator().manual_seed(step)
        order = torch.randperm(len(ids), generator=rng)
        inputs = ids[order]
        labels = ids if wrong else ids[order]
        return parts.next_token_loss(model(input_ids=inputs).logits, labels)

    parts.train(parts.llama(), watch, loss, data=range(STEPS))
