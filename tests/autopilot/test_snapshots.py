"""A snapshot restores weights, buffers and optimiser state, bit for bit."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from equipoise.autopilot.snapshots import KEPT, Snapshots, restore, sizes_of, take


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


def trained() -> tuple[nn.Module, AdamW]:
    model, optimizer = training()
    step(model, optimizer)
    return model, optimizer


def test_sizes_are_known_before_anything_is_copied() -> None:
    model, optimizer = training()
    before = sizes_of(model, optimizer)
    step(model, optimizer)
    after, one = sizes_of(model, optimizer), take(0, model, optimizer)
    assert after.memory == one.bytes
    counts = 4 * len(list(model.parameters()))  # Adam's step of each
    assert before.memory == after.memory - counts


def test_memory_is_bounded() -> None:
    model, optimizer = trained()
    one = take(0, model, optimizer).bytes
    ring = Snapshots(every=1, memory=3.5 * one / 1e9)
    news = [ring.take(at, model, optimizer) for at in range(6)]
    assert [s.step for s in ring.kept] == [0, 4, 5]
    assert news[0].startswith("roll-back: 3 snapshots of") and not any(news[1:])
    assert not Snapshots(every=1, memory=0).due(0)


def test_what_fits_nowhere_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    one = sizes_of(model, optimizer).memory
    monkeypatch.setattr("equipoise.autopilot.snapshots.take", None)
    small = Snapshots(every=1, memory=1.5 * one / 1e9)
    assert small.take(0, model, optimizer).startswith("no roll-back: a snapshot has")
    assert not small.kept and not small.due(5)


def test_what_memory_has_no_room_for_goes_to_disk_in_half_width(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights = everything(model, optimizer)[: len(model.state_dict())]
    moments = {n: dict(s) for n, s in take(0, model, optimizer).state.items()}
    ring = Snapshots(every=1, memory=1e-9, folder=tmp_path)
    assert "on disk" in ring.take(0, model, optimizer)
    assert not list(tmp_path.iterdir()), "a killed process would leave it"
    step(model, optimizer)
    restore(ring.kept[0], model, optimizer)
    assert same(weights, everything(model, optimizer)[: len(weights)])
    for name, p in model.named_parameters():
        for key, value in moments[name].items():
            here = optimizer.state[p][key]
            assert here.dtype == value.dtype
            torch.testing.assert_close(here, value, rtol=2**-8, atol=0)
    large = nn.Linear(1000, 1000)
    sizes = sizes_of(large, AdamW(large.parameters()))
    assert sizes.file / sizes.memory == pytest.approx(2 / 3, rel=0.01)


def test_moments_that_come_later_have_room_on_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)
    ring = Snapshots(every=1, memory=1e-9, folder=tmp_path)
    for at in range(3):
        assert "no more" not in ring.take(at, model, optimizer)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    assert len(ring.kept) == 3


def test_a_full_disk_ends_snapshots_and_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    ring = Snapshots(every=1, memory=1e-9, folder=tmp_path)
    ring.take(0, model, optimizer)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert "No space left on device; 1 are kept" in ring.take(1, model, optimizer)
    assert [s.step for s in ring.kept] == [0] and not ring.due(9)
    assert not list(tmp_path.iterdir())
