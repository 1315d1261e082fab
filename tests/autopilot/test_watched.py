"""The autopilot of a watched run: records, resume, and a run it does not touch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import equipoise
from equipoise.autopilot.options import Autopilot
from equipoise.errors import InputError
from equipoise.watching import Watch
from tests.models import GPT, GPTConfig

CONFIG = GPTConfig(width=16, depth=1, heads=2, context=8, vocabulary=16)
QUICK: dict[str, Any] = {"every": 1, "quiet": True, "strict": True}


class Loop:
    """A small training: its data come from a generator of its own."""

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.optimizer = AdamW(self.model.parameters(), lr=lr)
        self.data = torch.Generator().manual_seed(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randint(0, 16, (4, 8), generator=self.data)
            self.optimizer.zero_grad()
            self.loss(self.model, x).backward()
            self.optimizer.step()

    @staticmethod
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def watch(self, folder: Path, **options: Any) -> Watch:
        run = folder / "run.eqp"
        return equipoise.watch(self.model, self.optimizer, run=run, **QUICK, **options)

    def state(self) -> list[Tensor]:
        moments = [x for s in self.optimizer.state.values() for x in s.values()]
        return [*(x.clone() for x in [*self.model.state_dict().values(), *moments])]


def streams() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_run_without_an_alarm_is_not_touched(tmp_path: Path) -> None:
    """Weights, moments, random streams and hooks; snapshots are taken meanwhile."""
    alone, piloted, held = Loop(1e-3), Loop(1e-3), torch.ones(2, 8, dtype=torch.long)
    options = Autopilot(snapshot_every=2, loss=lambda m: Loop.loss(m, held))
    drawn = []
    for loop in (alone, piloted):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        if loop is alone:
            loop.steps(14)
        else:
            with loop.watch(tmp_path, autopilot=options) as handle:
                loop.steps(14)
            assert handle.autopilot is not None
            assert [e.event for e in handle.autopilot.log] == ["snapshots"]
            assert len(handle.autopilot.snapshots.kept) == 7
        drawn.append(streams())
    assert drawn[0] == drawn[1]
    assert all(map(torch.equal, alone.state(), piloted.state()))
    assert not piloted.optimizer._optimizer_step_pre_hooks


def test_an_alarm_is_treated_recorded_and_survives_a_checkpoint(
    tmp_path: Path,
) -> None:
    loop = Loop(3.0)  # absurd: updates are too large from the first step on
    held = torch.ones(2, 8, dtype=torch.long)
    options = Autopilot(
        snapshot_every=2, loss=lambda m: Loop.loss(m, held), apart=1, probation=2
    )
    with loop.watch(tmp_path, autopilot=options) as handle:
        loop.steps(11)
        pilot = handle.autopilot
        assert pilot is not None
        (room, entry) = pilot.log
        assert room.text.startswith("roll-back: 8 snapshots of")
        assert entry.event == "applied" and "back to step 0" in entry.text
        assert "shadow trial" in entry.text
        saved = handle.state_dict()
        weights = [x.clone() for x in loop.model.state_dict().values()]
        moments = loop.optimizer.state_dict()
    run = equipoise.open_run(tmp_path / "run.eqp")
    assert [a.remedy for a in run.applied] == ["learning_rate"]
    assert any(f.code == "autopilot.applied" for f in run.findings)
    again = Loop(3.0)
    again.model.load_state_dict(
        dict(zip(loop.model.state_dict(), weights, strict=True))
    )
    again.optimizer.load_state_dict(moments)
    with again.watch(tmp_path / "again", autopilot=options) as handle:
        handle.load_state_dict(saved)
        assert handle.autopilot is not None
        assert handle.autopilot.state.active == pilot.state.active
        assert str(entry) in str(handle.autopilot)
        before = [p.detach().clone() for p in again.model.parameters()]
        again.steps(1)
        now = again.model.parameters()
        moved = max(
            float((a - b).detach().abs().max())
            for a, b in zip(before, now, strict=True)
        )
        assert moved < 0.3 * 0.2  # a tenth of the rate, still warming up


def test_the_stored_batch_of_a_model_that_returns_its_loss_is_tried(
    tmp_path: Path,
) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(CONFIG)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            assert labels is not None
            found = F.cross_entropy(self.gpt(x).flatten(0, 1), labels.flatten())
            return type("Output", (), {"loss": found})()

    torch.manual_seed(0)
    model = WithLoss()
    optimizer = AdamW(model.parameters(), lr=3.0)
    with equipoise.watch(
        *(model, optimizer),
        **{**QUICK, "run": tmp_path / "run.eqp"},
        hold_batch=True,
        autopilot=Autopilot(untried=True),
    ) as handle:
        for _ in range(11):
            x = torch.randint(0, 16, (4, 8))
            optimizer.zero_grad()
            model(x, labels=x).loss.backward()
            optimizer.step()
        assert "shadow trial passes" in str(handle.autopilot)


def test_without_an_optimiser_there_is_nothing_to_act_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="acts on one optimiser.*none given"):
        equipoise.watch(Loop(1.0).model, run=tmp_path / "run.eqp", autopilot=True)


def test_an_optimiser_without_betas_is_treated_too(tmp_path: Path) -> None:
    loop = Loop(1.0)
    loop.optimizer = SGD(loop.model.parameters(), lr=300.0)  # type: ignore[assignment]
    with loop.watch(tmp_path, autopilot="dry-run") as handle:
        loop.steps(12)
    assert "would apply" in str(handle.autopilot)
