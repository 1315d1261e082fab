"""Mistakes in the loop: clipping, schedules, batches, other optimisers, experts."""

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from equipoise_lab.mistakes.case import STEPS, Attach, control, mistake
from equipoise_lab.mistakes.material import Decoder, batches, next_token_loss, text
from equipoise_lab.mistakes.opened.loss import Mixture


@mistake("check.clip_before_unscale", source="PyTorch AMP examples, gradient clipping")
def clipped_before_it_is_unscaled(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        scaler.scale(next_token_loss(model(ids), ids)).backward()
        if not wrong:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@mistake("check.clip_norm", source="DeepSpeed#1801 (TrainCheck)")
def clipped_by_the_norm_of_a_part(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        some = list(model.blocks[0].parameters()) if wrong else list(model.parameters())
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in some if p.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()


@mistake("check.clip_unused", source="PyTorch forum: clipping before backward")
def clipped_before_the_backward_pass(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = next_token_loss(model(ids), ids)
        if wrong:
            clip_grad_norm_(model.parameters(), 0.5)
        loss.backward()
        if not wrong:
            clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@mistake("check.schedule", source="transformers#24088")
def a_schedule_that_is_stepped_eight_times(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=60)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        for _ in range(8 if wrong else 1):
            schedule.step()


@mistake("check.schedule", source="own: a schedule of another optimiser")
def a_schedule_that_moves_nothing(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    other = torch.optim.AdamW(model.parameters(), lr=3e-3) if wrong else optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: min(1, step / 20))
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        schedule.step()


@mistake("check.schedule", source="Automodel#763")
def a_schedule_that_starts_again_at_a_resume(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS + 10)):
        if step == 35:
            at = schedule.state_dict()
            for group in optimizer.param_groups:
                group.pop("initial_lr")
                group["lr"] = 3e-3 if wrong else group["lr"]
            fresh = torch.optim.lr_scheduler.CosineAnnealingLR
            if wrong:
                schedule = fresh(optimizer, 60)
            else:
                kept = [group["lr"] for group in optimizer.param_groups]
                schedule = fresh(optimizer, 60)
                schedule.load_state_dict(at)
                for group, rate in zip(optimizer.param_groups, kept, strict=True):
                    group["lr"] = rate
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        schedule.step()


@mistake(
    "check.other_optimizer", source="own: the optimiser is made again after a phase"
)
def another_optimiser_than_the_watched_one(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    watched = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stepping = torch.optim.AdamW(model.parameters(), lr=3e-3) if wrong else watched
    watch(model, watched)
    for ids in batches(STEPS):
        stepping.zero_grad()
        next_token_loss(model(ids), ids).backward()
        stepping.step()


@mistake("check.same_batch", source="own: an iterator made again each step")
def one_batch_for_ever(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(seed=0 if wrong else step)
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


class Stuck(Mixture):
    """A bias sends every token to one expert."""

    def __init__(self, width: int, experts: int, *, wrong: bool) -> None:
        super().__init__(width, experts)
        start = torch.zeros(experts)
        start[0] = 50.0 if wrong else 0.0
        self.register_buffer("selection_bias", start)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        p = self.router(flat).softmax(-1)
        chosen = (p + self.selection_bias).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, expert(flat[at]) * p[at, number, None])
        return out.view_as(x)


@mistake("check.dead_experts", source="Megatron-LM#1545")
def experts_that_never_get_a_token(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    for block in model.blocks:
        block.mlp = Stuck(32, 4, wrong=wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake("check.no_movement", "check.schedule", source="pytorch#118115")
def a_rate_of_zero(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if wrong else 3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@control(source="gradient accumulation, as torch documents it")
def accumulation(watch: Attach) -> None:
    model, parts = Decoder(), 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for ids in batches(parts, seed=step + 1):
            (next_token_loss(model(ids), ids) / parts).backward()
        optimizer.step()


@control(source="warm-up from 0")
def a_warm_up_that_begins_at_zero(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        schedule.step()


@control(source="DCGAN, pytorch/examples")
def two_networks_in_turns(watch: Attach) -> None:
    made, judged = (
        Decoder(depth=1),
        nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 1)),
    )
    one = torch.optim.Adam(made.parameters(), lr=1e-3)
    two = torch.optim.Adam(judged.parameters(), lr=1e-3)
    watch(made, one)
    for ids in batches(STEPS):
        fake = made(ids).softmax(-1)
        real = torch.nn.functional.one_hot(ids, 32).float()
        two.zero_grad()
        (judged(fake.detach()).mean() - judged(real).mean()).tanh().backward()
        two.step()
        one.zero_grad()
        (next_token_loss(made(ids), ids) - 0.1 * judged(fake).mean().tanh()).backward()
        one.step()
