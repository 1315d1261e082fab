"""A judge with one rule, driven by hand: alarms and losses as a test wants them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW

from equipoise.autopilot.options import Autopilot
from equipoise.autopilot.pilot import Pilot
from equipoise.judging.history import History
from equipoise.judging.judge import Judge
from equipoise.judging.rules import Rule
from equipoise.records import Reading


def _measure(history: History) -> float | None:
    return history.scalar("test.size")


ALARM = Rule(
    name="test.alarm",
    reads=("test.size",),
    measure=_measure,
    threshold=1.0,
    release=1.0,
    persist=1,
    recover=1,
    source="a test",
    message="the size is {value:g}",
)


class TinyGPT(nn.Linear):
    """By its name a causal language model, so that the autopilot acts on it."""


class Training:
    """A model, an optimiser, a judge and an autopilot that step together."""

    def __init__(self, options: Autopilot, *, rules: Sequence[Rule] = (ALARM,)) -> None:
        torch.manual_seed(0)
        self.model = TinyGPT(3, 2)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.judge = Judge(rules=rules)
        self.pilot = Pilot(options, self.model)
        self.step = 0

    def run(self, losses: Sequence[float], *, size: float = 0.0) -> None:
        """Take a step for each loss; the alarm sounds while ``size`` is above 1."""
        for loss in losses:
            self.pilot.before_update(self.step, self.optimizer)
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()
            self.judge.add(
                [
                    Reading.scalar(self.step, "loss", loss),
                    Reading.scalar(self.step, "test.size", size),
                ]
            )
            self.pilot.consider(self.judge, self.optimizer)
            self.pilot.act(self.optimizer)
            self.step += 1

    @property
    def events(self) -> list[str]:
        return [e.event for e in self.pilot.log if e.event != "snapshots"]

    def weights(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()
