"""Shadow trials choose between candidates, and leave the run as it was, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.autopilot.options import Autopilot
from equipoise.autopilot.snapshots import take
from equipoise.autopilot.treatments import BY_NAME
from equipoise.autopilot.trial import Trial, no_trial, run_trial
from tests.autopilot.judged import Training

RATE = BY_NAME["a tenth of the rate"]


def noisy_loss(model: nn.Module) -> Tensor:
    """Draw from every generator, as a data loader and dropout do."""
    x = torch.randn(4, 3) + random.random() + np.random.rand()
    loss: Tensor = model(x).square().mean()
    return loss


def test_a_trial_leaves_weights_state_gradients_and_random_streams() -> None:
    found = Training(Autopilot(memory=0))
    found.run([2.0] * 3)
    grads = [p.grad.clone() for p in found.model.parameters() if p.grad is not None]
    before, kept = found.weights(), take(0, found.model, found.optimizer)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    both = found.model, found.optimizer
    made = run_trial(both, RATE, None, loss=noisy_loss, steps=5)
    assert made.ended > 0 and made.ended != made.began
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert found.weights() == before
    now = take(0, found.model, found.optimizer)
    assert all(torch.equal(x, kept.values[n]) for n, x in now.values.items())
    for name, state in now.state.items():
        assert all(torch.equal(x, kept.state[name][k]) for k, x in state.items())
    after = [p.grad for p in found.model.parameters() if p.grad is not None]
    assert all(map(torch.equal, grads, after))
    assert not found.optimizer._optimizer_step_pre_hooks


def test_a_trial_begins_at_its_snapshot() -> None:
    found = Training(Autopilot(memory=0))
    kept = take(0, found.model, found.optimizer)
    start = float(fixed_loss(found.model).detach())
    found.run([2.0] * 5)
    both = found.model, found.optimizer
    assert run_trial(both, RATE, kept, loss=fixed_loss, steps=2).began == start
    assert run_trial(both, RATE, None, loss=fixed_loss, steps=2).began != start


def fixed_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(1, 3)).square().sum()
    return loss


def test_what_passes() -> None:
    assert Trial(2.0, 2.19).passes and not Trial(2.0, 2.21).passes
    assert not Trial(2.0, float("nan")).passes
    assert str(Trial(2.0, 1.5)) == "shadow trial passes: loss 2 → 1.5"


def test_the_first_candidate_that_passes_is_applied() -> None:
    calls: list[int] = []

    def worse_at_first(model: nn.Module) -> Tensor:
        calls.append(1)
        rising = 2.0 ** len(calls) if len(calls) <= 3 else 0.0
        return fixed_loss(model) + rising

    found = Training(
        Autopilot(loss=worse_at_first, trial_steps=3, snapshot_every=5, apart=5)
    )
    found.optimizer.param_groups[0]["betas"] = (0.9, 0.6)
    found.run([2.0] * 30)
    found.run([3.0], size=2.0)
    assert found.events == ["refused", "applied"]
    refused, applied = found.pilot.log[-2:]
    assert "usual Adam settings" in refused.text and "trial fails" in refused.text
    assert "a tenth of the rate" in applied.text and "trial passes" in applied.text


def test_why_there_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Training(Autopilot(memory=0))
    found.run([2.0])
    both: Any = (found.model, found.optimizer)
    assert "give Autopilot(loss=" in no_trial(*both, None, memory=1.0)
    assert "a copy takes" in no_trial(*both, fixed_loss, memory=1e-9)
    assert no_trial(*both, fixed_loss, memory=1.0) == ""
    monkeypatch.setattr("equipoise.autopilot.trial.is_sharded", lambda p: True)
    assert no_trial(*both, fixed_loss, memory=1.0) == "the weights are sharded"
