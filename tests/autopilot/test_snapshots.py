"""A snapshot restores weights, buffers and optimiser state, bit for bit."""

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from equipoise.autopilot.snapshots import KEPT, Snapshots, restore, take


def training() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = [x for s in optimizer.state.values() for x in s.values()]
    return [x.detach().clone() for x in [*model.state_dict().values(), *state]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_restored_bit_for_bit_and_in_place() -> None:
    model, optimizer = training()
    step(model, optimizer)
    before, kept = everything(model, optimizer), take(1, model, optimizer)
    places = [p.data_ptr() for p in model.parameters()]
    for _ in range(3):
        step(model, optimizer)
    assert not same(before, everything(model, optimizer))
    restore(kept, model, optimizer)
    assert same(before, everything(model, optimizer))
    assert places == [p.data_ptr() for p in model.parameters()]


def test_before_the_first_step_there_is_no_optimiser_state() -> None:
    model, optimizer = training()
    kept = take(0, model, optimizer)
    step(model, optimizer)
    assert optimizer.state
    restore(kept, model, optimizer)
    assert not any(optimizer.state.values())
    step(model, optimizer)  # it begins anew


def test_state_that_was_forgotten_since_is_made_again() -> None:
    model, optimizer = training()
    step(model, optimizer)
    before, kept = everything(model, optimizer), take(1, model, optimizer)
    optimizer.state.clear()
    restore(kept, model, optimizer)
    assert same(before, everything(model, optimizer))
    step(model, optimizer)


def test_options_of_groups_belong_to_the_schedule() -> None:
    model, optimizer = training()
    kept = take(0, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    restore(kept, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_first_and_the_latest_are_kept() -> None:
    model, optimizer = training()
    ring = Snapshots(every=10, memory=1.0)
    for at in range(200):
        if ring.due(at):
            ring.take(at, model, optimizer)
    steps = [s.step for s in ring.kept]
    assert len(steps) == KEPT and steps[0] == 0
    assert steps[1:] == list(range(190 - 10 * (KEPT - 2), 200, 10))
    ring.forget_after(150)
    assert [s.step for s in ring.kept][-1] == 150


def test_memory_is_bounded() -> None:
    model, optimizer = training()
    one = take(0, model, optimizer).bytes
    tensors = [*model.state_dict().values()]
    assert one == sum(x.numel() * x.element_size() for x in tensors)
    ring = Snapshots(every=1, memory=3.5 * one / 1e9)
    for at in range(6):
        ring.take(at, model, optimizer)
    assert [s.step for s in ring.kept] == [0, 4, 5]
    small = Snapshots(every=1, memory=1.5 * one / 1e9)
    small.take(0, model, optimizer)
    assert small.too_large == one and not small.kept and not small.due(5)
    assert not Snapshots(every=1, memory=0).due(0)
