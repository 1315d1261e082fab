"""Mistakes of two ranks: who averages, who is averaged, and who is fed what."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from equipoise_lab.mistakes.case import mistake
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.groups import begin, share
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss


def shared_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of this rank's part of a step's batch."""
    return nano_loss(model, share(step))


def average_gradients(model: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Average the gradients over the ranks, as a loop without DDP does."""
    for name, parameter in model.named_parameters():
        if not any(part in name for part in but):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@mistake(
    "check.clip_norm",
    "check.replicas_differ",
    source="SpecForge#663, own: each rank clips, and the average comes after",
    kind="ddp",
    ranks=2,
)
def clipped_before_the_average(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = Nano()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    watch(model, optimizer)
    for step in range(STEPS):
        shared_loss(model, step).backward()
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        average_gradients(model)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "check.replicas_differ",
    source="apex#46, own: unfrozen after DDP took its list of weights",
    kind="ddp",
    ranks=2,
)
def blocks_unfrozen_after_they_were_wrapped(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    body = parts.learnt(Nano(), nano_loss)
    body.blocks.requires_grad_(not wrong)
    model = DistributedDataParallel(body)
    body.blocks.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run(model, watch, shared_loss, data=range(STEPS), optimizers=[optimizer])


@mistake(
    "check.same_batch_ranks",
    source="own: an iterable data set that is not divided among the ranks",
    kind="ddp",
    ranks=2,
)
def a_stream_that_is_not_divided(wrong: bool, watch: Attach) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            first, by = (0, 1) if wrong else (dist.get_rank(), 2)
            for number in range(first, 16 * STEPS, by):
                yield parts.text(1, seed=number)[0]

    begin()
    model = DistributedDataParallel(models.qwen3())
    data = (ids for ids, _ in zip(DataLoader(Stream(), 8), range(STEPS), strict=False))
    run(model, watch, parts.language_loss, data=data, clip=1.0)


@mistake(
    "check.wrapper_bypassed",
    "check.replicas_differ",
    source="kohya-ss/sd-scripts#924, own: the compiled module inside the wrapper runs",
    kind="ddp",
    ranks=2,
)
def a_compiled_module_inside_its_wrapper(wrong: bool, watch: Attach) -> None:
    begin()
    inner = torch.compile(Nano(), backend="eager")
    model = DistributedDataParallel(inner)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return shared_loss(inner if wrong else model, step)

    run(model, watch, loss, data=range(STEPS), clip=1.0)


@mistake(
    "check.replicas_differ",
    source="own: the first rank alone loads its checkpoint, after DDP's broadcast",
    kind="ddp",
    ranks=2,
)
def a_checkpoint_loaded_by_one_rank(wrong: bool, watch: Attach) -> None:
    rank = begin()
    torch.manual_seed(1)
    saved = parts.learnt(Nano(), nano_loss).state_dict()
    model = DistributedDataParallel(Nano())
    if rank == 0 or not wrong:
        model.module.load_state_dict(saved)
    run(model, watch, shared_loss, data=range(STEPS), lr=1e-3)


@mistake(
    "check.foreign_parameters",
    "check.not_optimised",
    source="dlrover#584, accelerate#3209: the optimiser was made before the shards",
    kind="fsdp2",
    ranks=2,
)
def an_optimiser_of_the_weights_before_their_shards(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = Nano()
    early = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = early if wrong else torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        model.zero_grad()
        shared_loss(model, step).backward()
        optimizer.step()


@mistake(
    "check.replicas_differ",
    "check.schedule",
    source="own: schedule.step() under `if rank == 0`, beside the logging",
    kind="ddp",
    ranks=2,
)
def a_schedule_that_only_one_rank_follows(wrong: bool, watch: Attach) -> None:
    rank = begin()
    model = DistributedDataParallel(Nano())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = loops.warm_cosine(optimizer)
    log = []
    watch(model, optimizer)
    for step in range(STEPS):
        loss = shared_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            log.append(float(loss))
        if rank == 0 or not wrong:
            schedule.step()


@mistake(
    "check.replicas_differ",
    source="own: the router is named as an expert, and its gradient stays where it is",
    kind="ddp",
    ranks=2,
)
def a_router_whose_gradient_is_not_averaged(wrong: bool, watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = models.sparse()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        models.balanced_loss(model, share(step)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_gradients(model, ("mlp.router",) if wrong else ())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
