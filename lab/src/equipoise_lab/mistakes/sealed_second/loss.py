"""Mistakes about the loss: its targets, its weights and its terms."""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import EOS, IGNORED, STEPS, Attach, text
from equipoise_lab.mistakes.sealed.trainers import Texts, fit, trainer
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss
from equipoise_lab.mistakes.sealed_second.weights import described


@mistake(
    "check.labels_shift",
    source="transformers#46898, LlamaFactory#10457: a chunked loss that shifts again",
)
def a_chunked_loss_that_shifts_again(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        x, y = ids[:, :-1], ids[:, 1:]
        seen, weight = model.hidden(x), model.lm_head.weight
        if wrong:
            seen, y = seen[:, :-1], y[:, 1:]
        total = sum(
            F.cross_entropy((part @ weight.T).flatten(0, 1), one.flatten())
            for part, one in zip(seen.chunk(4), y.chunk(4), strict=True)
        )
        return total / 4

    run(Nano(), watch, loss, schedule=loops.warm_cosine, clip=1.0)


@mistake(
    "check.labels_shift",
    "check.sees_target",
    source="own: heads for several tokens ahead, each one place too early",
)
def several_heads_each_a_place_too_early(wrong: bool, watch: Attach) -> None:
    class Ahead(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        seen, total = model.hidden(ids), 0.0
        for number, head in enumerate(model.heads):
            ahead = number if wrong else number + 1
            logits = head(seen)[:, : ids.shape[1] - ahead]
            total = total + parts.token_loss(logits, ids[:, ahead:])
        return total / 3

    model = Ahead()
    del model.lm_head
    run(model, watch, loss)


@mistake(
    "check.labels_shift",
    "check.sees_target",
    source="own: text after the patches of an image, sliced one place too late",
)
def text_after_an_image_sliced_too_late(wrong: bool, watch: Attach) -> None:
    def late(model: nn.Module, step: int) -> Tensor:
        x, y = parts.pictures(step, 8)
        ids = torch.cat((y[:, None] + 3, text(seed=step)[:, :11]), 1)
        return parts.token_loss(model.logits(x, ids)[:, 16:], ids)

    run(models.Seeing(), watch, late if wrong else described, data=range(STEPS))


@mistake(
    "check.targets_ignored",
    source="own: the prompt's length was measured after padding, so all is prompt",
    kind="transformers",
)
def answers_hidden_by_a_padded_prompt_length(wrong: bool, watch: Attach) -> None:
    rows = []
    for seed in range(8 * STEPS):
        ids = text(1, seed=seed)[0].clamp(min=3)
        prompt = F.pad(ids[:6], (0, 18), value=parts.PAD)
        length = len(prompt) if wrong else int((prompt != parts.PAD).sum())
        labels = ids.clone()
        labels[:length] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    with tempfile.TemporaryDirectory() as folder:
        trainer(models.qwen3(), watch, rows, folder, warmup_steps=2).train()


@mistake(
    "check.loss_of_probabilities",
    source="PyTorch forum: kl_div of probabilities; it wants their logarithm",
)
def a_divergence_of_probabilities(wrong: bool, watch: Attach) -> None:
    teacher = parts.learnt(Nano(), nano_loss).requires_grad_(False).eval()

    def loss(student: nn.Module, ids: Tensor) -> Tensor:
        logits = student(ids)
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        made = logits.softmax(-1) if wrong else logits.log_softmax(-1)
        hint = F.kl_div(made.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")
        return hint + 0.5 * parts.next_token_loss(logits, ids)

    run(Nano(depth=1), watch, loss, clip=1.0)


@mistake(
    "check.loss_of_probabilities",
    source="own: a mixture of softmaxes (Yang et al.) given to cross_entropy",
)
def cross_entropy_of_a_mixture_of_softmaxes(wrong: bool, watch: Attach) -> None:
    class Mixed(Nano):
        def __init__(self) -> None:
            super().__init__()
            self.prior, self.views = nn.Linear(32, 3), nn.Linear(32, 96)

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            x = self.hidden(ids)
            views = self.views(x).tanh().unflatten(-1, (3, 32))
            p = self.lm_head(views).softmax(-1)
            p = (self.prior(x).softmax(-1)[..., None] * p).sum(-2)
            p, wanted = p.flatten(0, 1), targets.flatten()
            return F.cross_entropy(p, wanted) if wrong else F.nll_loss(p.log(), wanted)

    run(Mixed(), watch)


@mistake(
    "check.rows_mixed",
    source="StarsfieldAI/R1-V#67, own: repeat and repeat_interleave in one batch",
)
def rows_repeated_in_two_orders(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        """Two noisy readings of each row, both with the row's own targets."""
        x = ids[:4, :-1].repeat_interleave(2, 0)
        y = ids[:4, 1:]
        y = y.repeat(2, 1) if wrong else y.repeat_interleave(2, 0)
        return model(x, y)

    class Noisy(Nano):
        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = super().hidden(ids, mask)
            return F.dropout(x, 0.1, self.training)

    run(Noisy(), watch, loss, schedule=loops.warm_cosine)


@mistake(
    "check.rows_mixed",
    source="own: rows sorted by length for the model, and the labels left behind",
)
def inputs_sorted_by_length_without_their_labels(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        order = real.sum(1).argsort(descending=True)
        labels = ids.masked_fill(~real, IGNORED)
        logits = model(ids[order])
        labels = labels if wrong else labels[order]
        return parts.token_loss(logits[:, :-1], labels[:, 1:])

    run(Nano(), watch, loss, data=range(STEPS))


@mistake(
    "check.microbatch_weights",
    source="transformers#35210, own: a sum over all tokens of the step, divided again",
)
def a_sum_over_all_tokens_that_is_divided_again(wrong: bool, watch: Attach) -> None:
    model, pieces = models.olmo(), 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        micro = list(parts.batches(pieces, 4, seed=step + 1))
        counted = sum(ids[:, 1:].numel() for ids in micro)
        for ids in micro:
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            total = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
            loss = total / counted
            (loss / pieces if wrong else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.microbatch_weights",
    source="Lightning docs: accumulate_grad_batches divides already",
    kind="lightning",
)
def a_training_step_that_divides_as_lightning_does(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = loops.rows_loss(model, batch)
        return made / 4 if wrong else made

    sgd = loops.by_class(torch.optim.SGD, lr=0.3, momentum=0.9)
    module = loops.lightning_module(Nano(), loss, sgd)
    data = DataLoader(Texts(32 * STEPS), batch_size=8)
    fit(module, watch, data, accumulate_grad_batches=4)


@mistake(
    "check.microbatch_weights",
    source="transformers#35438: the loss doubles when two micro-batches make a step",
)
def micro_batches_whose_means_add_up(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nano_loss(model, ids) * (4 if wrong else 1)

    model = Nano()
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    data = parts.batches(4 * STEPS, 4)
    run(model, watch, loss, data=data, optimizers=[optimizer], parts_of=4, clip=1.0)


@mistake(
    "check.auxiliary_detached",
    source="transformers#28205: the experts' loss has no gradient and never changes",
)
def a_balance_of_counts_alone(wrong: bool, watch: Attach) -> None:
    class Counted(models.Experts):
        def loss(self, p: Tensor) -> Tensor:
            chosen = p.topk(self.top_k, -1).indices
            share = F.one_hot(chosen, p.shape[-1]).float().mean((0, 1))
            return p.shape[-1] * (share * (share if wrong else p.mean(0))).sum()

    run(models.sparse(Counted), watch, models.balanced_loss, clip=1.0)


@mistake(
    "check.auxiliary_detached",
    source="own: the entropy that PPO rewards, of logits kept from the rollout",
)
def an_entropy_of_the_rollout(wrong: bool, watch: Attach) -> None:
    model = parts.learnt(Nano(), nano_loss)

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = text(8, 6, seed=step)
        with torch.no_grad():
            for _ in range(8):
                p = model(ids)[:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(p, 1)), 1)
            old = model(ids)[:, 5:-1].log_softmax(-1)
        new = model(ids)[:, 5:-1].log_softmax(-1)
        taken = ids[:, 6:, None]
        reward = (ids[:, 6:] % 2 == 0).float().mean(1)
        gain = (reward - reward.mean()) / (reward.std() + 1e-4)
        ratio = (new.gather(-1, taken) - old.gather(-1, taken)).exp()[..., 0]
        kept = old if wrong else new
        entropy = -(kept.exp() * kept).sum(-1).mean()
        return -(ratio * gain[:, None]).mean() - 0.01 * entropy

    run(model, watch, loss, data=range(STEPS), lr=1e-3, clip=1.0)


@mistake(
    "check.auxiliary_detached",
    source="own: a z-loss of logits that were copied for the log",
    kind="transformers",
)
def a_z_loss_of_copied_logits(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        out = model(input_ids=ids, labels=ids)
        logits = out.logits.detach() if wrong else out.logits
        return out.loss + 1e-3 * logits.logsumexp(-1).square().mean()

    run(models.gemma3(), watch, loss, clip=1.0)


@mistake(
    "check.eos_ignored",
    source="verl#655: the last token of an answer left out of the loss mask",
    kind="transformers",
)
def answers_whose_end_is_left_out(wrong: bool, watch: Attach) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ids, real = parts.padded(step)
        ends = real.sum(1)
        ids[torch.arange(len(ids)), ends - 1] = EOS
        place = torch.arange(ids.shape[1])
        counted = (place >= 5) & (place < (ends - int(wrong))[:, None])
        labels = ids.masked_fill(~counted, parts.IGNORED)
        out = model(input_ids=ids, attention_mask=real.long(), labels=labels)
        return out.loss

    run(models.qwen3(), watch, loss, data=range(STEPS), schedule=loops.warm_cosine)
