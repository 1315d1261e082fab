"""Mistakes of two ranks: who averages, who clips, and who is fed what."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach, Decoder, text


def begin() -> int:
    """Join the group that torchrun announced, and return this rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def share(step: int) -> Tensor:
    """Return this rank's part of a step's batch."""
    return text(seed=2 * step + dist.get_rank())


@mistake(
    "check.replicas_differ",
    source="own: gradients averaged by hand, and the start never broadcast",
    kind="ddp",
    ranks=2,
)
def ranks_that_start_from_other_weights(wrong: bool, watch: Attach) -> None:
    rank = begin()
    torch.manual_seed(100 + rank)
    model = Decoder()
    if not wrong:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, share(step)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


@mistake(
    "check.replicas_differ",
    "check.wrapper_bypassed",
    source="pytorch#104336 (TrainCheck): parameters replaced after DDP took its hooks",
    kind="ddp",
    ranks=2,
)
def parameters_replaced_under_their_wrapper(wrong: bool, watch: Attach) -> None:
    """What .cpu() and .cuda() did: DDP's hooks stay with the old tensors."""
    begin()
    model = DistributedDataParallel(Decoder())
    if wrong:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model._apply(lambda tensor: tensor.clone())
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, share(step)).backward()
        optimizer.step()


@mistake(
    "check.replicas_differ",
    source="own: no_sync() around every micro-batch, the last one too",
    kind="ddp",
    ranks=2,
)
def no_sync_around_the_last_micro_batch_too(wrong: bool, watch: Attach) -> None:
    begin()
    model = DistributedDataParallel(parts.gpt2())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            (parts.language_loss(model, share(2 * step)) / 2).backward()
            if wrong:
                (parts.language_loss(model, share(2 * step + 1)) / 2).backward()
        if not wrong:
            (parts.language_loss(model, share(2 * step + 1)) / 2).backward()
        optimizer.step()


@mistake(
    "check.replicas_differ",
    "check.clip_norm",
    source="DeepSpeed#1801 (TrainCheck): norms' weights clipped by each rank's norm",
    kind="ddp",
    ranks=2,
)
def tensor_parallel_ranks_clip_by_their_own_norm(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2,))
    model = Decoder()
    for block in model.blocks:
        ways = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, mesh, ways)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = text(seed=step)  # a group of tensor parallel ranks shares its batch
        optimizer.zero_grad()
        parts.own_loss(model, ids).backward()
        grads = [p.grad for p in model.parameters()]
        squares = [(_here(g).square().sum(), g) for g in grads]
        split = sum(square for square, g in squares if _is_split(g))
        plain = sum(square for square, g in squares if not _is_split(g))
        if not wrong:
            dist.all_reduce(split)
        norm = (split + plain).sqrt()
        for grad in grads:
            _here(grad).mul_((0.5 / norm).clamp(max=1.0))
        optimizer.step()


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_split(tensor: Tensor) -> bool:
    return any(p.is_shard() for p in getattr(tensor, "placements", ()))


@mistake(
    "check.clip_norm",
    source="pytorch#170862, LlamaFactory#10640: clipped by the norm of a shard",
    kind="fsdp2",
    ranks=2,
)
def shards_clipped_by_their_own_norm(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = parts.llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.language_loss(model, share(step)).backward()
        if wrong:
            local = [p.grad.to_local() for p in model.parameters()]
            norm = nn.utils.get_total_norm(local)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@mistake(
    "check.same_batch_ranks",
    source="accelerate docs: a loader that was not prepared gives each rank all rows",
    kind="accelerate",
    ranks=2,
)
def a_loader_that_was_not_prepared(wrong: bool, watch: Attach) -> None:
    from accelerate import Accelerator

    from equipoise_lab.mistakes.sealed.trainers import Texts

    accelerator = Accelerator(cpu=True)
    model = parts.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Texts(16 * STEPS), batch_size=8)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not wrong:
        loader = accelerator.prepare(loader)
    watch(model, optimizer)
    for step, batch in enumerate(loader):
        if step == STEPS:
            break
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()


@mistake(
    "check.wrapper_bypassed",
    "check.replicas_differ",
    source="x.com jxmnop (TrainCheck): the model is sometimes wrapped, sometimes not",
    kind="accelerate",
    ranks=2,
)
def the_unwrapped_model_is_trained(wrong: bool, watch: Attach) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = parts.qwen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    watch(model, optimizer)
    for step in range(STEPS):
        called = accelerator.unwrap_model(model) if wrong else model
        optimizer.zero_grad()
        accelerator.backward(parts.language_loss(called, share(step)))
        optimizer.step()


@mistake(
    "check.same_batch_ranks",
    source="LongLive#71: one seed for the sampler of every rank",
    kind="fsdp2",
    ranks=2,
)
def samplers_of_one_seed_and_no_rank(wrong: bool, watch: Attach) -> None:
    rank = begin()
    torch.manual_seed(1)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    rng = torch.Generator().manual_seed(0 if wrong else rank)
    for _ in range(STEPS):
        seed = int(torch.randint(1 << 30, (), generator=rng))
        optimizer.zero_grad()
        parts.own_loss(model, text(seed=seed)).backward()
        optimizer.step()


@mistake(
    "check.replicas_differ",
    source="pytorch#84803, #96600, Baichuan2#86 (TrainCheck): data lost on the way",
    kind="ddp",
    ranks=2,
)
def gradients_lost_on_the_way_to_one_rank(wrong: bool, watch: Attach) -> None:
    """A transport that zeroes a part of what the second rank receives."""
    rank = begin()
    model = DistributedDataParallel(Decoder())

    def averaged(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def received(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean = done.value()[0] / dist.get_world_size()
            if wrong and rank == 1:
                mean[: len(mean) // 20] = 0
            return mean

        return future.then(received)

    model.register_comm_hook(None, averaged)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.own_loss(model, share(step)).backward()
        optimizer.step()
