"""Controls: legal programs of two ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from equipoise_lab.mistakes.case import control
from equipoise_lab.mistakes.sealed import parts
from equipoise_lab.mistakes.sealed.groups import begin, share
from equipoise_lab.mistakes.sealed.parts import STEPS, Attach
from equipoise_lab.mistakes.sealed_second import loops, models
from equipoise_lab.mistakes.sealed_second.groups import average_gradients, shared_loss
from equipoise_lab.mistakes.sealed_second.loops import run
from equipoise_lab.mistakes.sealed_second.models import Nano, nano_loss


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@control(source="torch: ZeroRedundancyOptimizer", kind="ddp", ranks=2)
def moments_divided_among_ranks(watch: Attach) -> None:
    begin()
    model = DistributedDataParallel(Nano())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3
    )
    run(model, watch, shared_loss, data=range(STEPS), optimizers=[optimizer], clip=1.0)


@control(source="DDP: layers dropped at random, unused weights", kind="ddp", ranks=2)
def ddp_that_drops_layers(watch: Attach) -> None:
    class Dropping(Nano):
        def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            x, rope = models.rms(self.wte(ids)), self.rope(ids.shape[1])
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.25:
                    x = block(x, rope, mask)
            return models.rms(x)

    begin()
    model = DistributedDataParallel(Dropping(depth=3), find_unused_parameters=True)
    run(model, watch, shared_loss, data=range(STEPS))


@control(source="DDP: gradients compressed to fp16 by a hook", kind="ddp", ranks=2)
def ddp_that_compresses(watch: Attach) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    begin()
    model = DistributedDataParallel(models.qwen3())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def loss(model: nn.Module, step: int) -> Tensor:
        return parts.language_loss(model, share(step))

    run(model, watch, loss, data=range(STEPS), schedule=loops.warm_cosine, clip=1.0)


@control(source="own: gradients averaged by hand, then clipped", kind="ddp", ranks=2)
def gradients_averaged_by_hand(watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        shared_loss(model, step).backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@control(source="FSDP2: accumulation, gradients summed once", kind="fsdp2", ranks=2)
def shards_that_accumulate(watch: Attach) -> None:
    begin()
    torch.manual_seed(1)
    model = sharded(Nano())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            (shared_loss(model, 2 * step + micro) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@control(source="pipeline parallelism: each rank holds a half", kind="ddp", ranks=2)
def a_half_of_the_layers_each(watch: Attach) -> None:
    rank = begin()
    torch.manual_seed(1)
    model = Nano()
    if rank == 0:
        model.blocks, model.lm_head = model.blocks[:1], nn.Identity()
    else:
        model.blocks, model.wte = model.blocks[1:], nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids = parts.text(seed=step)
        rope = model.rope(24)
        if rank == 0:
            x = model.blocks[0](models.rms(model.wte(ids)), rope)
            dist.send(x.detach(), 1)
            grad = torch.empty_like(x)
            dist.recv(grad, 1)
            x.backward(grad)
        else:
            x = torch.empty(8, 24, 32)
            dist.recv(x, 0)
            x.requires_grad_()
            logits = model.lm_head(models.rms(model.blocks[0](x, rope)))
            parts.next_token_loss(logits, ids).backward()
            dist.send(x.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


@control(source="federated averaging after every five steps", kind="ddp", ranks=2)
def weights_averaged_every_five_steps(watch: Attach) -> None:
    begin()
    model = Nano()

    def after(step: int) -> None:
        if step % 5 == 4:
            for weight in model.parameters():
                dist.all_reduce(weight.data)
                weight.data /= 2

    run(model, watch, lambda m, step: nano_loss(m, share(step)), data=range(STEPS),
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)],
        after=after)  # fmt: skip
