"""What watching costs, beside what other monitors cost, in one process.

Every contestant trains its own copy of one model, a few steps in turn, in CPU seconds.
Peers that are not installed are left out by name:
``pip install --no-deps torch-module-monitor trainscope h5py``.

Usage: python -m benchmarks.overhead [small] [gpt2]
"""

import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import equipoise
from benchmarks import paired
from benchmarks.table import publish
from equipoise.lab.models.gpt import GPT, GPTConfig

EVERY = 10
# Tokens of a short step.
SHORT = 16
AfterBackward = Callable[[int, torch.Tensor], None]
Monitor = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Shape:
    """A model, its batch, and how long to look at it."""

    config: GPTConfig
    batch: int
    rounds: int
    """Each round is EVERY steps of every contestant."""
    pairs: int
    """Of a plain and a watched step."""
    short_pairs: int
    """Of steps so short that what idling costs can be seen."""
    peers: bool = True
    """Whether the peers run too: at the large shape a round of all takes an hour."""


SHAPES = {
    "small": Shape(GPTConfig(width=192, depth=4, heads=6, context=256), 8, 3, 14, 150),
    "gpt2": Shape(
        GPTConfig(width=768, depth=12, heads=12, context=1024, vocabulary=50257),
        1,
        1,
        3,
        12,
        peers=False,
    ),
}


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


@dataclass
class Contestant:
    """One model in training, and the CPU seconds of each of its steps."""

    name: str
    monitor: Monitor
    shape: Shape
    seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(self.shape.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.context = self.monitor(self.model, self.optimizer)
        self.after = self.context.__enter__()
        self.steps = itertools.count()
        vocabulary = self.shape.config.vocabulary
        size = (self.shape.batch, self.shape.config.context + 1)
        self.tokens = torch.randint(0, vocabulary, size)

    def step(self) -> float:
        step = next(self.steps)
        begin = time.process_time()
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.after(step, loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.process_time() - begin)
        return self.seconds[-1]

    def stop(self) -> None:
        self.context.__exit__(None, None, None)


def rounds(shape: Shape, contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Train in turns and compare the mean step of each with the plain one's."""
    for contestant in contestants:
        contestant.start()
        contestant.step()  # compiles, allocates, and is nobody's typical step
        contestant.seconds.clear()
    for _ in range(shape.rounds):
        for contestant in contestants:
            for _ in range(EVERY):
                contestant.step()
    for contestant in contestants:
        contestant.stop()
    return [_row(contestant, contestants[0]) for contestant in contestants]


def _row(contestant: Contestant, base: Contestant) -> dict[str, Any]:
    mean, median = (
        statistics.mean(contestant.seconds),
        statistics.median(contestant.seconds),
    )
    by_round = [
        sum(mine) / sum(theirs) - 1
        for mine, theirs in zip(
            _tens(contestant.seconds), _tens(base.seconds), strict=True
        )
    ]
    return {
        "monitor": contestant.name,
        "ms per step": 1000 * mean,
        "overhead %": 100 * (mean / statistics.mean(base.seconds) - 1),
        "median round %": 100 * statistics.median(by_round),
        "worst step / median": max(contestant.seconds) / median,
    }


def _tens(values: list[float]) -> list[tuple[float, ...]]:
    return [tuple(values[i : i + EVERY]) for i in range(0, len(values), EVERY)]


def compared(shape: Shape, name: str, monitor: Monitor) -> dict[str, Any]:
    """Take one plain step and one watched step in turns; return the ratio's spread."""
    base, other = Contestant("plain", plain, shape), Contestant(name, monitor, shape)
    for contestant in (base, other):
        contestant.start()
        contestant.step()
    found = paired.pairs(base.step, other.step, count=shape.pairs)
    other.stop()
    ratios = [theirs / mine for mine, theirs in found]
    median, low, high = paired.interval(ratios)
    return {
        "monitor": name,
        "pairs": len(ratios),
        "plain ms": 1000 * statistics.median(mine for mine, _ in found),
        "median ratio": median,
        "95 % from": low,
        "95 % to": high,
        "worst ratio": max(ratios),
    }


def idle(shape: Shape, step_ms: float) -> dict[str, Any]:
    """Return what an unsampled step costs, as a share of a step of ``step_ms``.

    Nothing that happens off-sample depends on the batch: it sees the loss, the norm and
    the learning rate. So the difference in milliseconds is taken from short steps of
    the same model, one sequence of a few tokens, where it is not lost in the noise.
    """
    config = replace(shape.config, context=SHORT)
    short = replace(shape, config=config, batch=1)
    base = Contestant("plain", plain, short)
    other = Contestant("equipoise idle", watched(10**9), short)
    for contestant in (base, other):
        contestant.start()
        contestant.step()
        contestant.step()
    found = paired.pairs(base.step, other.step, count=shape.short_pairs)
    other.stop()
    added = [1000 * (theirs - mine) for mine, theirs in found]
    median, low, high = paired.interval(added)
    return {
        "monitor": "equipoise idle, short steps",
        "pairs": len(added),
        "added ms": median,
        "95 % from ms": low,
        "95 % to ms": high,
        "of a step, %": 100 * median / step_ms,
        "from %": 100 * low / step_ms,
        "to %": 100 * high / step_ms,
    }


def main(wanted: list[str] | None = None) -> None:
    for name in wanted or list(SHAPES):
        shape = SHAPES[name]
        rows = [
            compared(shape, "equipoise default, every step", watched(1)),
            compared(shape, "equipoise idle", watched(10**9)),
        ]
        publish(f"overhead_{name}_pairs", rows)
        publish(f"overhead_{name}_idle", [idle(shape, rows[0]["plain ms"])])
        contestants = [
            Contestant("plain", plain, shape),
            Contestant("equipoise default, every 10", watched(EVERY), shape),
        ]
        contestants += [
            Contestant(title, monitor, shape)
            for title, (module, monitor) in PEERS.items()
            if shape.peers and importlib.util.find_spec(module)
        ]
        publish(f"overhead_{name}", rounds(shape, contestants), every=EVERY)


if __name__ == "__main__":
    main(sys.argv[1:])
