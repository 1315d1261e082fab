"""Controls: legal loops: accumulation, schedules, clipping, optimisers, precision."""

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import (
    IGNORED,
    STEPS,
    Attach,
    Decoder,
    batches,
    text,
)
from equipoise_lab.mistakes.sealed.trainers import Texts, fit, trainer


@control(source="accumulation weighted by tokens: unequal micro-batches")
def micro_batches_weighted_by_their_tokens(watch: Attach) -> None:
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        pieces = [parts.padded(4 * step + i) for i in range(4)]
        counted = sum(int(real[:, 1:].sum()) for _, real in pieces)
        optimizer.zero_grad()
        for ids, real in pieces:
            labels = ids.masked_fill(~real, IGNORED)
            logits = model(input_ids=ids, attention_mask=real.long()).logits
            total = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum")
            (total / counted).backward()
        optimizer.step()


@control(source="accumulation whose last window is shorter")
def a_last_window_that_is_shorter(watch: Attach) -> None:
    model, count = Decoder(), 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for epoch in range(10):
        pieces = list(batches(11, seed=epoch + 1))
        for number, ids in enumerate(pieces):
            (parts.own_loss(model, ids) / count).backward()
            if (number + 1) % count == 0 or number + 1 == len(pieces):
                optimizer.step()
                optimizer.zero_grad()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: one step up, one gradient, one step down."""

    def __init__(self, parameters, lr: float, radius: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.radius = radius

    @torch.no_grad()
    def step(self, closure):
        every = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm() + 1e-12
        moves = [self.radius * p.grad / norm for p in every]
        for p, move in zip(every, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            loss = closure()
        for p, move in zip(every, moves, strict=True):
            p.sub_(move)
        self.base.step()
        return loss


@control(source="SAM (Foret et al.)")
def sharpness_aware_minimisation(watch: Attach) -> None:
    model = Decoder()
    optimizer = Sam(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for ids in batches(STEPS):

        def closure(ids: Tensor = ids) -> Tensor:
            optimizer.zero_grad()
            loss = parts.own_loss(model, ids)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


@control(source="WGAN-GP: a penalty on the gradient, differentiated twice")
def a_gradient_penalty(watch: Attach) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    judge = Decoder(causal=False, depth=1)
    judge.tokens, judge.head = nn.Linear(32, 32), nn.Linear(32, 1)
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.0, 0.9))
    watch(judge, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        real = F.one_hot(ids, 32).float()
        fake = torch.rand(real.shape, generator=torch.Generator().manual_seed(step))
        fake = fake / fake.sum(-1, keepdim=True)
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            apart = judge(fake).mean() - judge(real).mean()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        (apart + 10 * penalty).backward()
        optimizer.step()


@control(source="time_sequence_prediction of pytorch/examples: LBFGS with a closure")
def lbfgs_with_a_closure(watch: Attach) -> None:
    model = Decoder(depth=1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(16, seed=step // 4)

        def closure(ids: Tensor = ids) -> Tensor:
            optimizer.zero_grad()
            loss = parts.own_loss(model, ids)
            loss.backward()
            return loss

        optimizer.step(closure)


@control(source="GradCache: representations first, gradients in pieces after")
def gradients_through_a_cache(watch: Attach) -> None:
    model = Decoder(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        a, b = text(16, seed=step), text(16, seed=step)
        b = torch.where(torch.rand(b.shape) < 0.2, torch.randint(32, b.shape), b)
        pieces = [*a.split(4), *b.split(4)]
        with torch.no_grad():
            cached = [model(piece).mean(1) for piece in pieces]
        cached = [one.requires_grad_() for one in cached]
        x = F.normalize(torch.cat(cached[:4]), dim=-1)
        y = F.normalize(torch.cat(cached[4:]), dim=-1)
        F.cross_entropy(x @ y.T / 0.1, torch.arange(16)).backward()
        optimizer.zero_grad()
        for piece, one in zip(pieces, cached, strict=True):
            (model(piece).mean(1) * one.grad).sum().backward()
        optimizer.step()


@control(source="AMP: the scaler skips a step now and then")
def steps_that_the_scaler_skips(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=8)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS + 5)):
        optimizer.zero_grad()
        scaler.scale(parts.own_loss(model, ids)).backward()
        if step % 9 == 3:  # what an overflow in half precision leaves
            model.head.weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@control(
    source="AMP with enabled=False: clipping before an unscaling that does nothing"
)
def clipped_before_a_scaler_that_is_off(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        scaler.scale(parts.own_loss(model, ids)).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@control(source="two losses, two backward passes over one graph")
def two_backward_passes(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        logits = model(ids)
        parts.next_token_loss(logits, ids).backward(retain_graph=True)
        (1e-3 * logits.logsumexp(-1).square().mean()).backward()
        optimizer.step()


@control(source="PCGrad: gradients of two tasks, projected")
def conflicting_gradients_projected(watch: Attach) -> None:
    model = Decoder()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        logits = model(ids)[:, :-1]
        losses = [
            parts.token_loss(logits[:, :12], ids[:, 1:13]),
            parts.token_loss(logits[:, 12:], ids[:, 13:]),
        ]
        one, two = (
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        x,
                        weights,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                ]
            )
            for x in losses
        )
        against = torch.dot(one, two).clamp(max=0)
        both = one + two - against * (two / two.dot(two) + one / one.dot(one))
        at = 0
        for weight in weights:
            weight.grad = both[at : at + weight.numel()].view_as(weight).clone()
            at += weight.numel()
        optimizer.step()


@control(source="non-reentrant checkpoints of every block")
def checkpointed_blocks(watch: Attach) -> None:
    class Checkpointed(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    parts.train(Checkpointed(dropout=0.1), watch)


@control(source="DP-SGD: gradients of single examples by vmap, clipped, with noise")
def gradients_of_single_examples(watch: Attach) -> None:
    from torch.func import functional_call, grad, vmap

    model = Decoder(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watch(model, optimizer)

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return parts.next_token_loss(
            functional_call(model, weights, row[None]), row[None]
        )

    for ids in batches(STEPS):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(
            dim=0
        )
        share = (1.0 / norms).clamp(max=1)
        for name, parameter in model.named_parameters():
            kept = torch.einsum("b,b...->...", share, each[name])
            parameter.grad = (kept + 0.01 * torch.randn_like(kept)) / len(ids)
        optimizer.step()


@control(source="ReLoRA: merged, and the optimiser's state cleared for it")
def low_rank_updates_merged_and_restarted(watch: Attach) -> None:
    from equipoise_lab.mistakes.sealed.legal_weights import LowRank

    model = parts.learnt(Decoder()).requires_grad_(False)
    maps = []
    for block in model.blocks:
        block.attention.q_proj = LowRank(block.attention.q_proj)
        maps.append(block.attention.q_proj)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    watch(model, optimizer)
    for step, ids in enumerate(parts.elsewhere()):
        if step and step % 15 == 0:
            with torch.no_grad():
                for one in maps:
                    one.base.weight += one.up.weight @ one.down.weight
                    nn.init.kaiming_uniform_(one.down.weight, a=5**0.5)
                    nn.init.zeros_(one.up.weight)
            optimizer.state.clear()
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()


@control(source="training in stages, each with an optimiser and a watch of its own")
def a_second_stage_watched_anew(watch: Attach) -> None:
    model = Decoder()
    for stage, rate in enumerate((3e-3, 5e-4)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        with watch(model, optimizer):
            for ids in batches(STEPS, seed=stage + 1):
                optimizer.zero_grad()
                parts.own_loss(model, ids).backward()
                optimizer.step()


@control(source="SGD without momentum keeps nothing")
def plain_gradient_descent(watch: Attach) -> None:
    model = Decoder()
    parts.train(model, watch, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))


@control(source="Lookahead (Zhang et al.): slow weights every five steps")
def slow_weights_every_five_steps(watch: Attach) -> None:
    model = Decoder()
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 5 == 4:
            with torch.no_grad():
                for kept, weight in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(weight, 0.5)
                    weight.copy_(kept)


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al.)."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(group["lr"] * m.lerp(p.grad, 0.1).sign())
                m.lerp_(p.grad, 0.01)


@control(source="Lion, an optimiser of one's own")
def an_optimiser_of_signs(watch: Attach) -> None:
    model = Decoder()
    parts.train(model, watch, optimizer=Lion(model.parameters(), lr=1e-3))


@control(
    source="a linear warm-up from 0, as transformers makes it", kind="transformers"
)
def a_first_step_at_rate_zero(watch: Attach) -> None:
    from transformers import get_cosine_schedule_with_warmup

    model = parts.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 8, STEPS)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, ids).backward()
        optimizer.step()
        schedule.step()


@control(source="discriminative rates: a group at 0 by design")
def a_group_at_rate_zero(watch: Attach) -> None:
    model = parts.learnt(Decoder())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [*model.tokens.parameters(), *model.positions.parameters()],
                "lr": 0.0,
            },
            {"params": model.blocks[0].parameters(), "lr": 5e-4},
            {"params": model.blocks[1].parameters(), "lr": 5e-4},
            {
                "params": [*model.norm.parameters(), *model.head.parameters()],
                "lr": 1e-3,
            },
        ]
    )
    parts.train(model, watch, data=parts.elsewhere(), optimizer=optimizer)


class Compensated(torch.optim.Optimizer):
    """AdamW on bf16 weights with a Kahan sum, or with stochastic rounding."""

    def __init__(self, parameters, lr: float, *, kahan: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kahan = kahan

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            kept = self.state[p]
            if not kept:
                for name in ("first", "second", "lost"):
                    kept[name] = torch.zeros_like(p, dtype=torch.float32)
                kept["step"] = 0
            g, kept["step"] = p.grad.float(), kept["step"] + 1
            kept["first"].lerp_(g, 0.1)
            kept["second"].lerp_(g.square(), 0.01)
            mean = kept["first"] / (1 - 0.9 ** kept["step"])
            spread = (kept["second"] / (1 - 0.99 ** kept["step"])).sqrt() + 1e-8
            wanted = p.float() - self.param_groups[0]["lr"] * mean / spread
            if self.kahan:
                wanted += kept["lost"]
                p.copy_(wanted)
                kept["lost"] = wanted - p.float()
            else:
                noise = torch.randint_like(wanted.view(torch.int32), 1 << 16)
                bits = (wanted.view(torch.int32) + noise) & -65536
                p.copy_(bits.view(torch.float32))


def _in_bf16(watch: Attach, *, kahan: bool) -> None:
    model = Decoder().bfloat16()
    optimizer = Compensated(model.parameters(), 2e-3, kahan=kahan)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return parts.next_token_loss(model(ids).float(), ids)

    parts.train(model, watch, loss, optimizer=optimizer)


@control(source="optimi, torchao: bf16 weights with a Kahan sum")
def bf16_with_a_kahan_sum(watch: Attach) -> None:
    _in_bf16(watch, kahan=True)


@control(source="torchao: bf16 weights with stochastic rounding")
def bf16_with_stochastic_rounding(watch: Attach) -> None:
    _in_bf16(watch, kahan=False)


def _scheduled(watch: Attach, make, *, per: int = 1, lr: float = 3e-3) -> None:
    """Train with a schedule that moves every `per` updates."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = make(optimizer)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        loss = parts.own_loss(model, ids)
        loss.backward()
        optimizer.step()
        if (step + 1) % per == 0:
            plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            schedule.step(*([loss.item()] if plateau else []))


@control(source="torch: sequential schedulers, one after the other")
def schedules_in_sequence(watch: Attach) -> None:
    _scheduled(
        watch,
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1, 1.0, 10),
                lr_scheduler.ConstantLR(o, 1.0, 1),
                lr_scheduler.CosineAnnealingLR(o, 20),
            ],
            [10, 20],
        ),
    )


@control(source="torch: chained schedulers, all at once")
def schedules_in_a_chain(watch: Attach) -> None:
    _scheduled(
        watch,
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.2, 1.0, 8), lr_scheduler.ExponentialLR(o, 0.98)]
        ),
    )


@control(source="a schedule that moves once an epoch")
def a_schedule_per_epoch(watch: Attach) -> None:
    _scheduled(watch, lambda o: lr_scheduler.StepLR(o, 2, 0.5), per=8)


@control(source="ReduceLROnPlateau")
def a_rate_that_falls_on_a_plateau(watch: Attach) -> None:
    make = lr_scheduler.ReduceLROnPlateau
    _scheduled(watch, lambda o: make(o, patience=2, threshold=0.3, factor=0.5))


@control(source="SGDR: warm restarts")
def warm_restarts(watch: Attach) -> None:
    _scheduled(watch, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10))


@control(source="one cycle, momentum cycled too")
def one_cycle(watch: Attach) -> None:
    _scheduled(watch, lambda o: lr_scheduler.OneCycleLR(o, 5e-3, STEPS))


@control(source="a schedule made after a step, called before training begins")
def a_schedule_stepped_at_its_start(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))
    optimizer.step()  # nothing has a gradient yet: silences torch's warning
    schedule.step()
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        schedule.step()


@control(source="nanoGPT: the rate written into the groups by the loop, down to 0")
def a_rate_written_by_the_loop(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        rate = 3e-3 * min(1.0, (step + 1) / 8, (STEPS - 1 - step) / 10)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()


@control(source="a resume: weights, moments, schedule and step are loaded again")
def a_resume_that_loads_everything(watch: Attach) -> None:
    def build():
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return model, optimizer, schedule

    before = build()
    for ids in batches(30, seed=4):
        before[1].zero_grad()
        parts.own_loss(before[0], ids).backward()
        before[1].step()
        before[2].step()
    after = build()
    for new, old in zip(after, before, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    model, optimizer, schedule = after
    watch(model, optimizer)
    for ids in batches(STEPS, seed=5):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        schedule.step()


@control(source="clipping per group of parameters")
def groups_clipped_apart(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        for part in (model.tokens, model.positions, *model.blocks, model.head):
            clip_grad_norm_(part.parameters(), 0.2)
        optimizer.step()


@control(source="clipping by value")
def gradients_clipped_by_value(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


@control(source="adaptive gradient clipping (NFNets)")
def gradients_clipped_by_their_weights(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        for p in model.parameters():
            most = 0.05 * p.detach().norm().clamp(min=1e-2)
            p.grad *= (most / (p.grad.norm() + 1e-6)).clamp(max=1)
        optimizer.step()


@control(source="the largest gradient as the norm; and a norm that is only logged")
def other_norms_of_gradients(watch: Attach) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        clip_grad_norm_(model.parameters(), float("inf"))  # logged, clips nothing
        clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf"))
        optimizer.step()


@control(source="replay buffers: old batches come back")
def batches_that_come_back(watch: Attach) -> None:
    seen = [text(seed=step) for step in range(12)]
    order = [(7 * step) % 12 for step in range(STEPS)]
    parts.train(Decoder(), watch, data=(seen[i] for i in order))


@control(source="a curriculum: rows grow longer, batches smaller")
def rows_that_grow(watch: Attach) -> None:
    data = (text(16 - step // 4, 8 + step // 2, seed=step) for step in range(STEPS))
    parts.train(Decoder(), watch, data=data)


@control(source="stochastic weight averaging beside the loop")
def averaged_weights_beside_the_loop(watch: Attach) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = Decoder()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        mean.update_parameters(model)
        if step % 10 == 9:
            mean.eval()
            with torch.no_grad():
                parts.own_loss(mean, text(seed=999))


@control(source="evaluation on averaged weights that are swapped in and out")
def averaged_weights_swapped_in_to_evaluate(watch: Attach) -> None:
    model = Decoder(dropout=0.1)
    mean = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 0.1)
        if step % 10 == 9:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(mean)
            model.eval()
            with torch.no_grad():
                parts.own_loss(model, text(seed=999))
            model.load_state_dict(kept)
            model.train()


@control(source="text generated between two updates", kind="transformers")
def text_generated_while_training(watch: Attach) -> None:
    model = parts.gpt2(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.language_loss(model, ids).backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                model.generate(ids[:2, :4], max_new_tokens=4, do_sample=False)
            model.train()


@control(source="Monte Carlo dropout: only dropout stays on in evaluation")
def dropout_on_purpose_in_evaluation(watch: Attach) -> None:
    model = Decoder(dropout=0.15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.train()
            with torch.no_grad():
                torch.stack([model(ids) for _ in range(4)]).var(0)
            model.train()


@control(source="a model without dropout, trained in evaluation mode")
def evaluation_mode_where_it_changes_nothing(watch: Attach) -> None:
    model = Decoder(dropout=0.0)
    model.eval()
    parts.train(model, watch)


@control(source="fine-tuning with BatchNorm's statistics frozen")
def frozen_batch_statistics(watch: Attach) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(1, 32, 4, 4), nn.BatchNorm2d(32), nn.ReLU()
            )
            self.place = nn.Parameter(0.1 * torch.randn(16, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(32, 4)

        def train(self, mode: bool = True):
            super().train(mode)
            self.stem[1].eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x).flatten(2).mT + self.place).mean(1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    model = Mixed()
    parts.learnt(model, loss, data=parts.every(lambda i: parts.pictures(900 + i), 30))
    model.train()
    parts.train(model, watch, loss, data=parts.every(parts.pictures), lr=1e-3)


@control(source="bf16 autocast around the model, fp32 weights", kind="transformers")
def bf16_autocast(watch: Attach) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return parts.language_loss(model, ids)

    parts.train(parts.qwen(), watch, loss)


@control(source="autocast entered, and left for a part that needs fp32")
def autocast_left_for_the_head(watch: Attach) -> None:
    class Guarded(Decoder):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
                for block in self.blocks:
                    x = block(x, mask)
            return self.head(self.norm(x.float()))

    parts.train(Guarded(), watch)


@control(source="a model compiled whole", kind="compiled")
def a_compiled_decoder(watch: Attach) -> None:
    model = Decoder()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(compiled, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(compiled, ids).backward()
        optimizer.step()


@control(source="blocks compiled one by one, as torchtitan does", kind="compiled")
def compiled_blocks(watch: Attach) -> None:
    model = parts.llama()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    parts.train(model, watch, parts.language_loss)


@control(source="inductor, with weights shared by input and output", kind="compiled")
def a_tied_decoder_under_inductor(watch: Attach) -> None:
    model = Decoder(tied=True, depth=1)
    model.compile()
    parts.train(model, watch)


@control(source="a compiled optimiser step", kind="compiled")
def a_compiled_step(watch: Attach) -> None:
    model = Decoder(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = torch.compile(optimizer.step, backend="eager")
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        step()


@control(source="Trainer: accumulation, warm-up, clipping, bf16", kind="transformers")
def a_trainer_that_accumulates(watch: Attach) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            parts.llama(),
            watch,
            Texts(16 * STEPS),
            folder,
            gradient_accumulation_steps=2,
            lr_scheduler_type="linear",
            warmup_steps=8,
            bf16=True,
        ).train()


@control(
    source="Trainer: smoothed labels, checkpointing, Adafactor", kind="transformers"
)
def a_trainer_with_label_smoothing(watch: Attach) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            parts.gpt2(dropout=0.1),
            watch,
            Texts(),
            folder,
            label_smoothing_factor=0.1,
            gradient_checkpointing=True,
            optim="adafactor",
            neftune_noise_alpha=5.0,
        ).train()


@control(
    source="Trainer: an image classifier, evaluated on the way", kind="transformers"
)
def a_trainer_of_images_that_evaluates(watch: Attach) -> None:
    import tempfile

    x, y = parts.pictures(1, 8 * STEPS)
    data = [
        {"pixel_values": a, "labels": b} for a, b in zip(x, y.tolist(), strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            parts.vit(hidden_dropout_prob=0.1),
            watch,
            data,
            folder,
            eval_dataset=data[:16],
            eval_strategy="steps",
            eval_steps=10,
        ).train()


@control(source="Trainer and PEFT: LoRA with its dropout", kind="peft")
def a_trainer_of_adapters(watch: Attach) -> None:
    import tempfile

    from equipoise_lab.mistakes.sealed.trainers import lora

    base = parts.learnt(parts.qwen(), parts.language_loss)
    options = {"target_modules": "all-linear", "lora_dropout": 0.05}
    model = lora(base, task_type="CAUSAL_LM", **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer(model, watch, Texts(), folder, learning_rate=5e-3).train()


@control(source="Accelerate: accumulation, clipping and a schedule", kind="accelerate")
def accelerate_accumulates(watch: Attach) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = parts.qwen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
    loader = DataLoader(Texts(16 * STEPS), batch_size=8, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    model, optimizer, loader, schedule = prepared
    watch(model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def _lightning(**parts_of_it):
    from lightning.pytorch import LightningModule

    class Words(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.gpt2(dropout=0.1)

        def training_step(self, batch, number):
            return self.model(**batch).loss

        def validation_step(self, batch, number):
            self.log("held", self.model(**batch).loss)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, 100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Words()
    module.model.train()
    return module


@control(
    source="Lightning: accumulation, clipping, a schedule per step", kind="lightning"
)
def lightning_accumulates(watch: Attach) -> None:
    fit(
        _lightning(),
        watch,
        DataLoader(Texts(16 * STEPS), batch_size=8),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )


@control(source="Lightning: bf16-mixed", kind="lightning")
def lightning_in_bf16(watch: Attach) -> None:
    data = DataLoader(Texts(), batch_size=8, shuffle=True)
    fit(_lightning(), watch, data, precision="bf16-mixed")


@control(source="Lightning: a GAN with two optimisers, by hand", kind="lightning")
def lightning_with_two_optimisers(watch: Attach) -> None:
    from lightning.pytorch import LightningModule

    class Adversaries(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.made, self.judge = Decoder(depth=1), Decoder(depth=1, causal=False)
            self.judge.tokens, self.judge.head = nn.Linear(32, 32), nn.Linear(32, 1)

        def training_step(self, batch, number):
            one, two = self.optimizers()
            ids = batch["input_ids"]
            logits = self.made(ids)
            fake = logits.softmax(-1)
            self.toggle_optimizer(one)
            loss = parts.next_token_loss(logits, ids)
            self.manual_backward(loss + 0.1 * F.softplus(-self.judge(fake)).mean())
            one.step()
            one.zero_grad()
            self.untoggle_optimizer(one)
            self.toggle_optimizer(two)
            real = F.one_hot(ids, 32).float()
            wrong = F.softplus(-self.judge(real)) + F.softplus(
                self.judge(fake.detach())
            )
            self.manual_backward(wrong.mean())
            two.step()
            two.zero_grad()
            self.untoggle_optimizer(two)

        def configure_optimizers(self):
            make = torch.optim.Adam
            one = make(self.made.parameters(), lr=2e-3)
            return [one, make(self.judge.parameters(), lr=1e-3)], []

    # Lightning counts a step for each optimiser.
    data = DataLoader(Texts(8 * STEPS), batch_size=8)
    fit(Adversaries(), watch, data, max_steps=2 * STEPS)


@control(source="MAML: an inner step that is differentiated through")
def learning_to_learn(watch: Attach) -> None:
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = Decoder(depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        near, far = text(4, seed=2 * step), text(4, seed=2 * step + 1)
        weights = dict(model.named_parameters())
        with sdpa_kernel(SDPBackend.MATH):
            inner = parts.next_token_loss(functional_call(model, weights, near), near)
            slopes = torch.autograd.grad(
                inner, list(weights.values()), create_graph=True
            )
            moved = {
                name: weight - 0.1 * slope
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
            outer = parts.next_token_loss(functional_call(model, moved, far), far)
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()


@control(source="two tasks in turns, each with its head")
def two_tasks_in_turns(watch: Attach) -> None:
    class Both(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(32, 2)

        def forward(self, ids: Tensor, mask: Tensor | None = None, task: int = 0):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, mask)
            x = self.norm(x)
            return self.other(x[:, -1]) if task else self.head(x)

    def loss(model: nn.Module, step: int) -> Tensor:
        if step % 2 == 0:
            ids = text(seed=step)
            return parts.next_token_loss(model(ids), ids)
        ids, y = parts.labelled(step)
        return F.cross_entropy(model(ids, task=1), y) * 3

    parts.train(Both(), watch, loss, data=range(STEPS))


@control(source="Hugging Face data, streamed and shuffled by workers")
def rows_from_workers(watch: Attach) -> None:
    class Drawn(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            for number in itertools.count(info.id, info.num_workers):
                yield text(1, seed=number)[0]

    loader = DataLoader(Drawn(), 8, num_workers=2)
    parts.train(Decoder(), watch, data=itertools.islice(loader, STEPS))
