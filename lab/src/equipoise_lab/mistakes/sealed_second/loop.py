"""Mistakes in the loop: clipping, schedules, batches, optimisers and experts."""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, batches
from equipoise_lab.mistakes.sealed.trainers import Texts, arguments, fit
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss


@mistake(
    "check.clip_before_unscale",
    source="PyTorch AMP recipe, own: values are clipped while they are scaled",
)
def values_clipped_while_they_are_scaled(wrong: bool, watch: Attach) -> None:
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    watch(model, optimizer)
    for ids in batches(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nano_loss(model, ids)
        scaler.scale(loss).backward()
        if wrong:
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@mistake(
    "check.clip_before_unscale",
    "check.clip_norm",
    source="own: a fixed scale of the loss, taken out of the gradients after clipping",
)
def a_fixed_scale_taken_out_after_clipping(wrong: bool, watch: Attach) -> None:
    model, scale = models.olmo(), 1024.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watch(model, optimizer)

    def unscale() -> None:
        for parameter in model.parameters():
            parameter.grad.div_(scale)

    for ids in batches(STEPS):
        (parts.language_loss(model, ids) * scale).backward()
        if not wrong:
            unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if wrong:
            unscale()
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.clip_unused",
    source="own: a callback that clips at on_optimizer_step, which comes after it",
    kind="transformers",
)
def a_callback_that_clips_after_the_step(wrong: bool, watch: Attach) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clip(TrainerCallback):
        def clip(self, args, state, control, model=None, **kwargs):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    setattr(Clip, "on_optimizer_step" if wrong else "on_pre_optimizer_step", Clip.clip)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=models.qwen3(),
            args=TrainingArguments(**arguments(folder, max_grad_norm=0.0)),
            train_dataset=Texts(),
            callbacks=[watch.trainer_callback(), Clip()],
        ).train()


@mistake(
    "check.schedule",
    "check.no_movement",
    source="own: step // warmup instead of step / warmup: a rate of 0 all along",
)
def a_warm_up_by_integer_division(wrong: bool, watch: Attach) -> None:
    def schedule(optimizer: torch.optim.Optimizer):
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(1, (step + 1) // 60 if wrong else (step + 1) / 20),
        )

    run(Nano(), watch, schedule=schedule, clip=1.0)


@mistake(
    "check.schedule",
    "check.no_movement",
    source="open-instruct#646, BONSAI#156: a schedule of one epoch of four",
    kind="transformers",
)
def a_schedule_that_ends_after_the_first_epoch(wrong: bool, watch: Attach) -> None:
    from transformers import get_linear_schedule_with_warmup

    epochs, rows = 4, Texts(8 * 12)
    loader = DataLoader(rows, batch_size=8)
    total = len(loader) if wrong else epochs * len(loader)
    data = [batch["input_ids"] for _ in range(epochs) for batch in loader]

    def schedule(optimizer: torch.optim.Optimizer):
        return get_linear_schedule_with_warmup(optimizer, 2, total)

    run(models.gemma3(), watch, parts.language_loss, data=data, schedule=schedule)


@mistake(
    "check.schedule",
    source="Lightning docs: automatic optimisation steps it, and so does the user",
    kind="lightning",
)
def a_schedule_stepped_by_lightning_and_by_hand(wrong: bool, watch: Attach) -> None:
    def configure(module: nn.Module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = loops.lightning_module(Nano(), loops.rows_loss, configure)

    class ByHand(type(module)):
        def on_train_batch_end(self, outputs, batch, number):
            if wrong:
                self.lr_schedulers().step()

    fit(ByHand(), watch, DataLoader(Texts(), batch_size=8))


@mistake(
    "check.schedule",
    source="starVLA#210: the schedule moves with each micro-batch of accelerate",
    kind="accelerate",
)
def a_bare_schedule_inside_accumulate(wrong: bool, watch: Attach) -> None:
    accelerator = loops.accelerator(gradient_accumulation_steps=3)
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 130)
    loader = DataLoader(Texts(24 * STEPS), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nano_loss(model, batch["input_ids"]))
            optimizer.step()
            if wrong or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()


@mistake(
    "check.same_batch",
    source="PyTorch forum: next(iter(loader)) in the loop makes a new iterator",
)
def a_new_iterator_for_every_step(wrong: bool, watch: Attach) -> None:
    loader = DataLoader(Texts(8 * STEPS), batch_size=8, shuffle=False)
    going = iter(loader)
    data = (next(iter(loader) if wrong else going)["input_ids"] for _ in range(STEPS))
    run(Nano(), watch, data=data, clip=1.0, evaluate=nano_loss)


@mistake(
    "check.same_batch",
    source="own: a stream that is seeded again by every call for a batch",
    kind="lightning",
)
def a_stream_seeded_for_every_batch(wrong: bool, watch: Attach) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            rng = torch.Generator().manual_seed(1)
            for _ in range(STEPS):
                if wrong:
                    rng.manual_seed(1)
                seed = int(torch.randint(10**6, (), generator=rng))
                yield parts.text(seed=seed)

    module = loops.lightning_module(parts.gpt2(), parts.language_loss)
    fit(module, watch, DataLoader(Stream(), batch_size=None))


@mistake(
    "check.other_optimizer",
    "check.no_movement",
    source="own: an optimiser is named, and Trainer is not given it and makes its own",
    kind="transformers",
)
def a_trainer_that_makes_another_optimiser(wrong: bool, watch: Attach) -> None:
    from transformers import Trainer, TrainingArguments

    model = models.neox()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    given = {} if wrong else {"optimizers": (optimizer, None)}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=model,
            args=TrainingArguments(**arguments(folder)),
            train_dataset=Texts(),
            **given,
        ).train()


@mistake(
    "check.dead_experts",
    source="own: half of the experts are skipped, as if another rank held them",
)
def experts_of_a_rank_that_is_not_there(wrong: bool, watch: Attach) -> None:
    class Local(models.Experts):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            weight, chosen = self.weights(flat)
            here = len(self.experts) // (2 if wrong else 1)
            out = torch.zeros_like(flat)
            for number in range(here):
                at, slot = (chosen == number).nonzero(as_tuple=True)
                made = self.experts[number](flat[at]) * weight[at, slot, None]
                out = out.index_add(0, at, made)
            return out.view_as(x)

    run(models.sparse(Local, count=8), watch, models.balanced_loss)


@mistake(
    "check.dead_experts",
    source="own: experts padded to a round number, and a mask one too wide",
)
def a_mask_of_padded_experts_one_too_wide(wrong: bool, watch: Attach) -> None:
    class Padded(models.Experts):
        def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
            real = 5 if wrong else 6
            scores = self.router(x).masked_fill(torch.arange(6) >= real, -1e9)
            p = scores.softmax(-1)
            self.balance = self.loss(p)
            return p.topk(self.top_k, -1)

    run(models.sparse(Padded, count=6), watch, models.balanced_loss, clip=1.0)
