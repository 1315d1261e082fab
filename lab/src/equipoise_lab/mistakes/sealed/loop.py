"""Mistakes in the loop: clipping, schedules, batches and experts."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, Decoder, batches, text


@mistake(
    "check.clip_before_unscale",
    source="PyTorch AMP examples: unscale_ after clipping",
    kind="transformers",
)
def unscaled_only_after_clipping(wrong: bool, watch: Attach) -> None:
    model = parts.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = parts.language_loss(model, ids)
        scaler.scale(loss).backward()
        if not wrong:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        if wrong:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@mistake(
    "check.clip_norm",
    "check.clip_unused",
    source="stackoverflow: parameters() is a generator, and empty the second time",
)
def clipped_by_an_exhausted_generator(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    weights = model.parameters() if wrong else list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.3, momentum=0.9)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        clip_grad_norm_(weights, 0.5)
        optimizer.step()


@mistake(
    "check.clip_unused", source="own: clipping after the update", kind="transformers"
)
def clipped_after_the_update(wrong: bool, watch: Attach) -> None:
    model = parts.gemma()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, ids).backward()
        if wrong:
            optimizer.step()
        clip_grad_norm_(model.parameters(), 1.0)
        if not wrong:
            optimizer.step()


@mistake(
    "check.schedule",
    source="transformers#24088, own: the schedule moves with each micro-batch",
)
def a_schedule_stepped_for_each_micro_batch(wrong: bool, watch: Attach) -> None:
    model, count = Decoder(), 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 4 * STEPS + 10)
    watch(model, optimizer)
    for step in range(count * STEPS):
        ids = text(4, seed=step)
        (parts.own_loss(model, ids) / count).backward()
        last = (step + 1) % count == 0
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if wrong or last:
            schedule.step()


@mistake(
    "check.schedule",
    "check.no_movement",
    source="forums: a warm-up from 0 whose step() is never called",
    kind="transformers",
)
def a_warm_up_that_is_never_stepped(wrong: bool, watch: Attach) -> None:
    from transformers import get_linear_schedule_with_warmup

    model = parts.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, 100)
    watch(model, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, ids).backward()
        optimizer.step()
        if not wrong:
            schedule.step()


@mistake(
    "check.same_batch",
    source="forums: __getitem__ that ignores its index",
)
def a_dataset_that_ignores_the_index(wrong: bool, watch: Attach) -> None:
    class Texts(Dataset):
        def __len__(self) -> int:
            return 8 * STEPS

        def __getitem__(self, index: int) -> Tensor:
            return text(1, seed=0 if wrong else index)[0]

    loader = DataLoader(Texts(), batch_size=8, shuffle=True)
    parts.train(Decoder(), watch, data=loader)


@mistake(
    "check.same_batch",
    source="stackoverflow 67180955 (TrainCheck): NumPy seeded alike in all workers",
)
def workers_that_draw_alike_each_epoch(wrong: bool, watch: Attach) -> None:
    """One batch an epoch and worker; each worker's first draws are the same."""

    class Drawn(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Tensor:
            return text(1, seed=int(np.random.randint(1 << 30)))[0]

    def reseeded(worker: int) -> None:
        np.random.seed(0 if wrong else torch.initial_seed() % (1 << 32))

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for _ in range(STEPS // 2):
        loader = DataLoader(
            Drawn(), 8, num_workers=2, worker_init_fn=reseeded, in_order=True
        )
        for ids in loader:
            optimizer.zero_grad()
            parts.own_loss(model, ids).backward()
            optimizer.step()


@mistake(
    "check.dead_experts",
    source="Megatron-LM#1545, own: a correction bias that starves an expert",
    kind="transformers",
)
def a_correction_bias_that_starves_an_expert(wrong: bool, watch: Attach) -> None:
    model = parts.deepseek()
    for layer in model.model.layers:
        bias = layer.mlp.gate.e_score_correction_bias
        bias[1] = -10.0 if wrong else 0.0
    parts.train(model, watch, parts.language_loss)


@mistake(
    "check.dead_experts",
    source="own: expert indices taken modulo one too few",
)
def an_expert_that_the_index_never_reaches(wrong: bool, watch: Attach) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 2
            self.gate = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            p = self.gate(flat).softmax(-1)
            share, chosen = p.topk(self.top_k, -1)
            if wrong:
                chosen = chosen % (len(self.experts) - 1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                row, slot = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, row, expert(flat[row]) * share[row, slot, None])
            return out.view_as(x)

    model = Decoder()
    for block in model.blocks:
        block.mlp = Experts()
    optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
    parts.train(model, watch, optimizer=optimizer)


@mistake(
    "check.other_optimizer",
    source="own: a second phase with an optimiser that was not named",
)
def a_second_phase_with_another_optimiser(wrong: bool, watch: Attach) -> None:
    model = Decoder()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    descent = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch(model, adam)
    for step, ids in enumerate(batches(STEPS)):
        used = descent if wrong and step >= 5 else adam
        used.zero_grad()
        parts.own_loss(model, ids).backward()
        used.step()


@mistake(
    "check.not_repeatable",
    source="Switch Transformers, own: the router's jitter stays on in evaluation",
)
def a_router_that_jitters_in_evaluation(wrong: bool, watch: Attach) -> None:
    class Jittered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 1
            self.gate = nn.Linear(32, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            seen = flat
            if self.training or wrong:
                seen = flat * (1 + 0.1 * (2 * torch.rand_like(flat) - 1))
            weight, chosen = self.gate(seen).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                at = (chosen == number).nonzero()[:, 0]
                out = out.index_add(0, at, weight[at, None] * expert(flat[at]))
            return out.view_as(x)

    model = Decoder()
    for block in model.blocks:
        block.mlp = Jittered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step, ids in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                parts.own_loss(model, text(seed=999))
            model.train()


@mistake(
    "check.eager_differs",
    source="flash-attention#1065, own: the fused path forgets the soft cap",
    kind="compiled",
)
def a_compiled_path_without_the_soft_cap(wrong: bool, watch: Attach) -> None:
    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (
                one.unflatten(-1, (4, 8)).transpose(1, 2)
                for one in self.qkv(x).chunk(3, -1)
            )
            scores = 2 * q @ k.mT
            if not (wrong and torch.compiler.is_compiling()):
                scores = (scores / 2).tanh() * 2
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            return self.out((p @ v).transpose(1, 2).flatten(-2))

    model = Decoder()
    for block in model.blocks:
        block.attention = Capped()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(compiled, optimizer)
    for ids in batches(STEPS):
        optimizer.zero_grad()
        parts.own_loss(compiled, ids).backward()
        optimizer.step()
