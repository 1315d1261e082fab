"""Who watches in the overhead benchmark: nobody, ourselves, and our peers."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import equipoise

EVERY = 10
AfterBackward = Callable[[int, torch.Tensor], None]
Monitor = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


@contextmanager
def plain(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
    yield lambda step, loss: None


def watched(every: int, preset: str = "default") -> Monitor:
    @contextmanager
    def monitor(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
        run = Path(tempfile.mkdtemp()) / "run.eqp"
        with equipoise.watch(model, optimizer, run=run, every=every, preset=preset):
            yield lambda step, loss: None

    return monitor


@contextmanager
def module_monitor(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
    from torch_module_monitor import ModuleMonitor

    monitor = ModuleMonitor(monitor_step_fn=lambda step: step % EVERY == 0)
    monitor.set_module(model)
    monitor.add_activation_metric("norm", lambda x: x.norm(dim=-1))
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.add_parameter_metric("norm", lambda p: p.norm())
    monitor.begin_step(0)

    def after(step: int, loss: torch.Tensor) -> None:
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        monitor.end_step()
        monitor.begin_step(step + 1)

    yield after


@contextmanager
def trainscope(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
    from trainscope import TrainScope, TrainScopeConfig

    config = TrainScopeConfig(run_dir=tempfile.mkdtemp())
    scope = TrainScope(model, optimizer, config).attach()
    yield lambda step, loss: scope.step(loss.item())
    scope.detach()


@contextmanager
def wandb_watch(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=tempfile.mkdtemp())
    run.watch(model, log="all", log_freq=EVERY)
    yield lambda step, loss: run.log({"loss": loss.item()}, step=step)
    run.finish()


@contextmanager
def tensorboard(model: Any, optimizer: Any) -> Iterator[AfterBackward]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())

    def after(step: int, loss: torch.Tensor) -> None:
        if step % EVERY == 0:
            for name, parameter in model.named_parameters():
                writer.add_histogram(name, parameter, step)
                writer.add_histogram(f"{name}.grad", parameter.grad, step)

    yield after
    writer.close()


PEERS: dict[str, tuple[str, Monitor]] = {
    "torch-module-monitor, every 10": ("torch_module_monitor", module_monitor),
    "trainscope, defaults": ("trainscope", trainscope),
    "wandb.watch(all), every 10": ("wandb", wandb_watch),
    "TensorBoard histograms, every 10": ("tensorboard", tensorboard),
}
