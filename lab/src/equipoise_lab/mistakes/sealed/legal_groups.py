"""Controls: legal programs of two ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.groups import begin, share
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, Decoder, text


@control(source="DDP with a DistributedSampler", kind="ddp", ranks=2)
def ddp_with_its_sampler(watch: Attach) -> None:
    from equipoise_lab.mistakes.sealed.trainers import Texts

    begin()
    model = DistributedDataParallel(parts.gpt2(dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Texts(8 * STEPS)
    sampler = DistributedSampler(data, shuffle=True)
    watch(model, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, 8, sampler=sampler):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@control(
    source="DDP: no_sync() for all micro-batches but the last", kind="ddp", ranks=2
)
def ddp_that_accumulates(watch: Attach) -> None:
    begin()
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            (parts.own_loss(model, share(2 * step)) / 2).backward()
        (parts.own_loss(model, share(2 * step + 1)) / 2).backward()
        optimizer.step()


@control(source="FSDP2: mixed precision, clipping of DTensors", kind="fsdp2", ranks=2)
def fsdp2_in_bf16(watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = parts.llama()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, share(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@control(source="tensor parallelism: one batch, weights in parts", kind="ddp", ranks=2)
def tensor_parallel_feed_forward(watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2,))
    model = Decoder()
    for block in model.blocks:
        ways = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, mesh, ways)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, text(seed=step)).backward()
        optimizer.step()


@control(
    source="DiLoCo: ranks apart, and averaged every ten steps", kind="ddp", ranks=2
)
def ranks_averaged_every_ten_steps(watch: Attach) -> None:
    begin()
    model = Decoder()
    outer = [p.detach().clone() for p in model.parameters()]
    speed = [torch.zeros_like(p) for p in outer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, share(step)).backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                for kept, v, p in zip(outer, speed, model.parameters(), strict=True):
                    moved = kept - p
                    dist.all_reduce(moved)
                    v.mul_(0.9).add_(moved / 2)
                    kept.sub_(0.7 * v)
                    p.copy_(kept)


@control(
    source="GRPO: ranks share a prompt and draw answers of their own",
    kind="ddp",
    ranks=2,
)
def ranks_that_share_a_prompt(watch: Attach) -> None:
    rank = begin()
    model = DistributedDataParallel(parts.learnt(Decoder()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(rank)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(1, 4, seed=step).repeat(8, 1)
        with torch.no_grad():
            for _ in range(6):
                p = model.module(ids)[:, -1].softmax(-1)
                ids = torch.cat((ids, torch.multinomial(p, 1, generator=draws)), 1)
        reward = (ids[:, 4:] % 2 == 0).float().mean(1)
        both = [torch.empty_like(reward) for _ in range(2)]
        dist.all_gather(both, reward)
        gain = reward - torch.cat(both).mean()
        optimizer.zero_grad()
        each = F.cross_entropy(model(ids)[:, 3:-1].mT, ids[:, 4:], reduction="none")
        (gain * each.sum(1)).mean().backward()
        optimizer.step()


@control(source="DDP: BatchNorm's buffers are each rank's own", kind="ddp", ranks=2)
def buffers_of_each_rank(watch: Attach) -> None:
    class Stemmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 32, 4, 4), nn.BatchNorm2d(32))
            self.body = Decoder(causal=False, depth=1).blocks
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).flatten(2).mT
            for block in self.body:
                x = block(x)
            return self.head(x.mean(1))

    rank = begin()
    model = DistributedDataParallel(Stemmed(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        x, y = parts.pictures(2 * step + rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control(
    source="Accelerate: a prepared schedule moves once for each process",
    kind="accelerate",
    ranks=2,
)
def a_schedule_that_moves_once_a_process(watch: Attach) -> None:
    from accelerate import Accelerator

    from equipoise_lab.mistakes.sealed.trainers import Texts

    accelerator = Accelerator(cpu=True)
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4 * STEPS)
    loader = DataLoader(Texts(16 * STEPS), batch_size=8)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    model, optimizer, loader, schedule = prepared
    watch(model, optimizer)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@control(source="expert parallelism: each rank owns an expert", kind="ddp", ranks=2)
def an_expert_of_each_rank(watch: Attach) -> None:
    class Exchange(torch.autograd.Function):
        """Send the halves of a batch to the ranks, and their gradients back."""

        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x.contiguous())
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            out = torch.empty_like(grad)
            dist.all_to_all_single(out, grad.contiguous())
            return out

    class Experts(nn.Module):
        """Even channels of work go to rank 0's expert, odd ones to rank 1's."""

        def __init__(self) -> None:
            super().__init__()
            rng = torch.random.get_rng_state()
            torch.manual_seed(50 + dist.get_rank())
            self.expert = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            torch.random.set_rng_state(rng)

        def forward(self, x: Tensor) -> Tensor:
            sent = x.flatten(0, 1)
            pairs = torch.cat((sent[0::2], sent[1::2]))
            back = Exchange.apply(self.expert(Exchange.apply(pairs)))
            half = len(back) // 2
            return torch.stack((back[:half], back[half:]), 1).flatten(0, 1).view_as(x)

    begin()
    model = Decoder()
    model.blocks[1].mlp = Experts()
    owned = {id(p) for p in model.blocks[1].mlp.parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, share(step)).backward()
        for parameter in model.parameters():
            if id(parameter) not in owned:
                dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
