"""Caps on weights, exact weights, and options of remedies that the autopilot uses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from equipoise.errors import InputError
from equipoise.remedies.catalogue import remedy
from equipoise.remedies.losses import balance_gradient, without_component


def stepped(model: nn.Module, optimizer: Any, *, size: float = 1.0) -> None:
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, size)
    optimizer.step()


def test_a_matrix_that_grows_is_held_at_its_limit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.0)
    limit = 1.5 * model.weight.detach().norm()
    chosen = remedy("weight_cap", times=1.5)
    assert chosen.preserves_function
    before = model.weight.detach().clone()
    undo = chosen.apply(model, optimizer)
    assert torch.equal(model.weight, before)
    with torch.no_grad():
        model.weight.mul_(1.2), model.bias.mul_(9.0)
    stepped(model, optimizer)
    assert torch.allclose(model.weight, 1.2 * before)  # below the limit: left alone
    with torch.no_grad():
        model.weight.mul_(5.0)
    stepped(model, optimizer)
    assert model.weight.detach().norm() == pytest.approx(float(limit), rel=1e-5)
    assert torch.allclose(model.weight / limit, before / before.norm(), atol=1e-6)
    undo()
    with torch.no_grad():
        model.weight.mul_(5.0)
    stepped(model, optimizer)
    assert model.weight.norm() > 4 * limit


def test_large_weights_are_scaled_once_to_the_usual_size() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32))
    with torch.no_grad():
        model[0].weight.normal_(std=3.0), model[1].weight.normal_(std=0.01)
    small = model[1].weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.0)
    chosen = remedy("weight_cap", gain=0.7, lasts=False)
    assert not chosen.preserves_function
    undo = chosen.apply(model, optimizer)
    rms = model[0].weight.detach().square().mean().sqrt()
    assert float(rms) == pytest.approx(0.7 / 64**0.5, rel=1e-5)
    assert torch.equal(model[1].weight, small) and undo.details["scaled"] == 1
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(InputError, match="gain of weight_cap must be positive"):
        remedy("weight_cap", gain=-1.0).apply(model, optimizer)


def test_limits_survive_in_the_progress() -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.0)
    first = remedy("weight_cap").apply(model, optimizer)
    kept = copy.deepcopy(first.progress)
    first()
    limit = model.weight.detach().norm()
    with torch.no_grad():
        model.weight.mul_(3.0)
    again = remedy("weight_cap").apply(model, optimizer)
    again.progress.update(kept)
    stepped(model, optimizer)
    assert model.weight.detach().norm() == pytest.approx(float(limit), rel=1e-5)


def rounded(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 8).round() / 8)


@pytest.mark.parametrize("exact", [True, False])
def test_small_updates_add_up_although_weights_are_rounded(exact: bool) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0), nn.init.constant_(model.bias, 1.0)
    optimizer = SGD(model.parameters(), lr=0.01)
    undo = remedy("master_weights").apply(model, optimizer) if exact else None
    for _ in range(10):
        rounded(model)
        stepped(model, optimizer)
    expected = 0.9 if exact else 0.99  # 10 steps of 0.01, or the last one alone
    assert torch.allclose(model.weight, torch.full((2, 2), expected), atol=1e-6)
    if undo is not None:
        undo()
        assert not optimizer._optimizer_step_pre_hooks


def test_weights_that_were_replaced_are_taken_as_they_are() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.0)
    remedy("master_weights").apply(model, optimizer)
    with torch.no_grad():
        model.weight.fill_(5.0)  # a checkpoint, an average
    stepped(model, optimizer)
    assert torch.equal(model.weight, torch.full((2, 2), 5.0))


def test_narrow_parameters_cannot_be_exact() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(InputError, match="keep them in float32"):
        remedy("master_weights").apply(model, SGD(model.parameters(), lr=0.1))


def test_every_step_is_left_out_until_undone() -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    undo = remedy("skip_step", always=True).apply(model, optimizer)
    for _ in range(12):  # more than `most`
        stepped(model, optimizer)
        assert all(p.grad is not None for p in model.parameters())
    assert str(before) == str([model.state_dict(), optimizer.state_dict()])
    undo()
    stepped(model, optimizer)
    assert str(before[0]) != str(model.state_dict())


def test_a_wrong_sign_of_the_balance_loss_is_removed_whatever_its_size() -> None:
    torch.manual_seed(0)
    z_xE, task_xE = (
        torch.randn(20, 4) + torch.tensor([2.0, 0, 0, 0]),
        torch.randn(20, 4),
    )
    balance_xE = balance_gradient(z_xE, 1)
    along = (task_xE * balance_xE).sum() / balance_xE.square().sum()
    task_xE = task_xE - along * balance_xE  # at right angles to it
    for weight in (0.1, 20.0, 1e4):
        found = without_component(task_xE - weight * balance_xE, balance_xE)
        # float32: the part that is removed is `weight` times as large as what is left
        assert torch.allclose(found, task_xE, atol=1e-6 * max(1.0, weight))
    kept = task_xE + 3.0 * balance_xE
    assert torch.equal(without_component(kept, balance_xE), kept)


def test_usual_norms_of_spike_handling_survive_a_resume() -> None:
    torch.manual_seed(0)
    start = nn.Linear(3, 2)

    def training() -> tuple[nn.Module, SGD]:
        model = copy.deepcopy(start)
        return model, SGD(model.parameters(), lr=0.1)

    model, optimizer = training()
    undo = remedy("spike_handling", warmup=2).apply(model, optimizer)
    for _ in range(4):
        stepped(model, optimizer)
    kept, saved = copy.deepcopy(undo.progress), copy.deepcopy(model.state_dict())
    stepped(model, optimizer, size=100.0)
    again, its_optimizer = training()
    again.load_state_dict(saved)
    resumed = remedy("spike_handling", warmup=2).apply(again, its_optimizer)
    resumed.progress.update(kept)
    stepped(again, its_optimizer, size=100.0)
    assert torch.equal(model.weight, again.weight)  # type: ignore[arg-type]
    assert torch.equal(model.bias, again.bias)  # type: ignore[arg-type]
    unclipped = saved["weight"] - 0.1 * 100.0
    assert not torch.allclose(again.weight, unclipped)  # type: ignore[arg-type]
