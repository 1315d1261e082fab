"""Mistakes about the loss: what is compared with what, and how it is weighed."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import STEPS, Attach, mistake
from equipoise_lab.mistakes.material import (
    IGNORED,
    VOCABULARY,
    Decoder,
    batches,
    next_token_loss,
    text,
)


def _train(model: nn.Module, watch: Attach, loss, *, lr: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.labels_shift", source="LlamaFactory#10457")
def labels_shifted_twice(wrong: bool, watch: Attach) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        shifted = F.pad(ids, (0, 1), value=IGNORED)[:, 1:]
        labels = shifted if wrong else ids
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=IGNORED,
        )

    _train(Decoder(), watch, loss)


@mistake("check.labels_shift", "check.sees_target", source="transformers#3711")
def labels_not_shifted(wrong: bool, watch: Attach) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        if wrong:
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return next_token_loss(logits, ids)

    _train(Decoder(), watch, loss)


@mistake("check.targets_ignored", source="trl#6668")
def every_label_is_ignored(wrong: bool, watch: Attach) -> None:
    class WithLoss(Decoder):
        def forward(self, ids, labels):
            logits = super().forward(ids)
            return F.cross_entropy(
                logits[:, :-1].flatten(0, 1),
                labels[:, 1:].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            ) / labels[:, 1:].ne(IGNORED).sum().clamp(min=1)

    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        labels = torch.full_like(ids, IGNORED) if wrong else ids
        optimizer.zero_grad()
        model(ids, labels).backward()
        optimizer.step()


EOS, PAD = 1, 0


def _documents(seed: int) -> Tensor:
    """Return rows that hold a document, its end, and padding."""
    ids = text(seed=seed).clamp(min=2)
    ends = torch.randint(
        8, 20, (len(ids),), generator=torch.Generator().manual_seed(seed)
    )
    place = torch.arange(ids.shape[1])
    ids = ids.masked_fill(place == ends[:, None], EOS)
    return ids.masked_fill(place > ends[:, None], PAD)


@mistake("check.eos_ignored", source="trl#6357")
def padding_is_the_end_token(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = _documents(step)
        labels = ids.masked_fill(ids == PAD, IGNORED)
        if wrong:
            ids = ids.masked_fill(ids == PAD, EOS)
            labels = ids.masked_fill(ids == EOS, IGNORED)
        optimizer.zero_grad()
        logits = model(ids)
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ).backward()
        optimizer.step()


@mistake("check.loss_of_probabilities", source="PyTorch forum: softmax before the loss")
def cross_entropy_of_probabilities(wrong: bool, watch: Attach) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return next_token_loss(logits.softmax(-1) if wrong else logits, ids)

    _train(Decoder(), watch, loss)


@mistake("check.rows_mixed", source="own: a shuffle of the inputs alone")
def targets_of_other_rows(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        targets = ids.roll(1, 0) if wrong else ids
        optimizer.zero_grad()
        next_token_loss(model(ids), targets).backward()
        optimizer.step()


@mistake("check.microbatch_weights", source="transformers#37766")
def accumulated_losses_not_divided(wrong: bool, watch: Attach) -> None:
    model, parts = Decoder(), 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for ids in batches(parts, seed=step + 1):
            loss = next_token_loss(model(ids), ids)
            (loss if wrong else loss / parts).backward()
        optimizer.step()


@mistake("check.microbatch_weights", source="transformers#37197")
def accumulated_losses_divided_twice(wrong: bool, watch: Attach) -> None:
    model, parts = Decoder(), 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for ids in batches(parts, seed=step + 1):
            loss = next_token_loss(model(ids), ids) / parts
            (loss / parts if wrong else loss).backward()
        optimizer.step()


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.top_k = 1
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        p = self.router(flat).softmax(-1)
        weight, chosen = p.max(-1)
        share = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (share * p.mean(0)).sum()
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, expert(flat[at]) * weight[at, None])
        return out.view_as(x)


@mistake("check.auxiliary_detached", source="minimind#140")
def a_balance_loss_that_is_only_logged(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    for block in model.blocks:
        block.mlp = Mixture(32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        loss = next_token_loss(model(ids), ids)
        balance = sum(block.mlp.balance for block in model.blocks)
        (loss + 0.01 * (balance.item() if wrong else balance)).backward()
        optimizer.step()


@mistake("check.loss_of_probabilities", source="PyTorch forum: log_softmax and NLL")
def negative_log_likelihood_of_probabilities(wrong: bool, watch: Attach) -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        made = logits.softmax(-1) if wrong else logits.log_softmax(-1)
        return F.nll_loss(made[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    _train(Decoder(VOCABULARY), watch, loss)
