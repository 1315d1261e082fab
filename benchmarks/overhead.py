"""What watching costs, beside what other monitors cost, in one process.

Every contestant trains its own copy of one model, one step each in turn, in CPU
seconds. Peers that are not installed are left out by name:
``pip install --no-deps torch-module-monitor trainscope h5py``.

A bar of 3 % is below what one step of a shared machine varies by, so no mean of steps
can show it. Each step is divided by the plain step taken just before or after it; of
the ratios of sampled steps the median is taken, of the others likewise, and "mean %" is
(sampled + 9 others)/10 − 1: a step that another process disturbed counts once, not by
its length. The interval is a bootstrap of both medians. "from its parts %" is the check
by other means: a tenth of a sampled step's extra, from pairs of every step (the table
"pairs"), and what idling adds, from short steps (the table "idle"). The row "plain,
another copy" compares plain steps with plain steps: what it shows is the measure's own
error.

Usage: python -m benchmarks.overhead [small] [gpt2]
"""

import importlib.util
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import paired
from benchmarks.monitors import EVERY, PEERS, Monitor, plain, watched
from benchmarks.table import publish
from tests.models import GPT, GPTConfig

# Tokens of a short step.
SHORT = 16


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
    """Train in turns, step by step, and compare each step with the plain one's."""
    for contestant in contestants:
        contestant.start()
        contestant.step()  # compiles, allocates, and is nobody's typical step
        contestant.seconds.clear()
    for step in range(shape.rounds * EVERY):
        for contestant in contestants if step % 2 else reversed(contestants):
            contestant.step()
    for contestant in contestants:
        contestant.stop()
    return [_row(contestant, contestants[0]) for contestant in contestants]


def _row(contestant: Contestant, base: Contestant) -> dict[str, Any]:
    steps = list(zip(base.seconds, contestant.seconds, strict=True))
    ratios = [mine / theirs for theirs, mine in steps]
    # The step that was left out was number 0, and sampled.
    sampled = ratios[EVERY - 1 :: EVERY]
    others = [ratio for i, ratio in enumerate(ratios, 1) if i % EVERY]
    mean, low, high = paired.mean_of_medians([(1, sampled), (EVERY - 1, others)])
    median = statistics.median(contestant.seconds)
    return {
        "monitor": contestant.name,
        "ms per step": 1000 * median,
        "mean %": 100 * (mean - 1),
        "95 % from": 100 * (low - 1),
        "95 % to": 100 * (high - 1),
        "sampled ÷ plain": statistics.median(sampled),
        "worst step ÷ median": max(contestant.seconds) / median,
    }


def compared(shape: Shape, name: str, monitor: Monitor) -> dict[str, Any]:
    """Take one plain step and one watched step in turns; return the ratio's spread."""
    base, other = Contestant("plain", plain, shape), Contestant(name, monitor, shape)
    for contestant in (base, other):
        contestant.start()
        contestant.step()
    found = paired.pairs(base.step, other.step, count=shape.pairs)
    other.stop()
    return {"monitor": name, **paired.summary(found)}


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


def from_parts(sampled: float, idle_percent: float) -> float:
    """Return the mean overhead in percent of one sampled step among EVERY."""
    return (100 * (sampled - 1) + (EVERY - 1) * idle_percent) / EVERY


def main(wanted: list[str] | None = None) -> None:
    for name in wanted or list(SHAPES):
        shape = SHAPES[name]
        rows = [
            compared(shape, "equipoise default, every step", watched(1)),
            compared(shape, "equipoise idle", watched(10**9)),
            compared(shape, "plain, another copy", plain),
        ]
        publish(f"overhead_{name}_pairs", rows)
        idling = idle(shape, rows[0]["plain ms"])
        publish(f"overhead_{name}_idle", [idling])
        contestants = [
            Contestant("plain", plain, shape),
            Contestant("equipoise default, every 10", watched(EVERY), shape),
        ]
        contestants += [
            Contestant(title, monitor, shape)
            for title, (module, monitor) in PEERS.items()
            if shape.peers and importlib.util.find_spec(module)
        ]
        table = rounds(shape, contestants)
        table[1]["from its parts %"] = from_parts(
            rows[0]["median ratio"], idling["of a step, %"]
        )
        publish(f"overhead_{name}", table, every=EVERY)


if __name__ == "__main__":
    main(sys.argv[1:])
