"""Mistakes of two ranks: what they train on, and who averages their gradients."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from equipoise_lab.mistakes.case import STEPS, Attach, control, mistake
from equipoise_lab.mistakes.material import Decoder, next_token_loss, text


def _batch(step: int, rank: int) -> torch.Tensor:
    return text(seed=2 * step + rank)


@mistake(
    "check.same_batch_ranks",
    source="rbyte#106: every rank draws the same rows",
    kind="ddp",
    ranks=2,
)
def ranks_read_the_same_batches(wrong: bool, watch: Attach) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = _batch(step, 0 if wrong else dist.get_rank())
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()


@mistake(
    "check.wrapper_bypassed",
    "check.replicas_differ",
    source="PyTorch forum: model.module is called in the loop",
    kind="ddp",
    ranks=2,
)
def the_module_is_called_instead_of_its_wrapper(wrong: bool, watch: Attach) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Decoder())
    called = model.module if wrong else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = _batch(step, dist.get_rank())
        optimizer.zero_grad()
        next_token_loss(called(ids), ids).backward()
        optimizer.step()


@control(source="torch's FSDP2 tutorial", kind="fsdp2", ranks=2)
def a_decoder_in_shards(watch: Attach) -> None:
    dist.init_process_group("gloo")
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = _batch(step, dist.get_rank())
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
