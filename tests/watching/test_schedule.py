"""Which steps are sampled, what that costs, and how both survive a checkpoint."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise
from equipoise.errors import InputError
from equipoise.judging.judge import LEAST_SAMPLES
from equipoise.watching.step.schedule import FIRST_STEPS, Meter, Schedule
from tests.watching.models import TinyModel, batches, objective, trained


def sampled(schedule: Schedule, steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        if schedule.due:
            found.append(schedule.step)
        schedule.advance()
    return found


@given(every=st.integers(1, 9), start=st.integers(0, 50), cut=st.integers(0, 30))
def test_a_checkpoint_keeps_the_phase(every: int, start: int, cut: int) -> None:
    whole = Schedule(every=every, step=start)
    expected = sampled(whole, 40)
    first, second = Schedule(every=every, step=start), Schedule(every=every)
    before = sampled(first, cut)
    second.load_state_dict(first.state_dict())
    assert before + sampled(second, 40 - cut) == expected
    assert expected == list(range(start, start + 40, every))


@pytest.mark.parametrize("state", [{}, {"step": "x"}, {"step": None}, []])
def test_another_state_is_refused_and_changes_nothing(state: Any) -> None:
    schedule = Schedule(every=4, step=3)
    before = schedule.state_dict()
    with pytest.raises(InputError, match="of a watch"):
        schedule.load_state_dict(state)
    assert schedule.state_dict() == before


def test_named_steps_are_sampled_besides() -> None:
    assert sampled(Schedule(every=4, at=[1, 8, 9]), 12) == [0, 1, 4, 8, 9]


@pytest.mark.parametrize("every", [1, 3, 7, 10, 100, 10_000])
def test_a_dense_start_samples_ten_of_thirty_steps_and_keeps_the_phase(
    every: int,
) -> None:
    plain = sampled(Schedule(every=every), 100)
    dense = sampled(Schedule(every=every, dense_start=True), 100)
    assert dense[:3] == [0, 1, 2] and sum(step < 30 for step in dense) >= LEAST_SAMPLES
    assert [step for step in dense if step >= 30] == [s for s in plain if s >= 30]


def test_a_first_verdict_stands_by_step_thirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EQUIPOISE_DENSE_START")
    _, handle = trained(TinyModel, run=tmp_path / "a.eqp", steps=30, every=1000)
    assert handle is not None
    assert handle.verdict.reason != "few_samples"
    found = equipoise.open_run(handle.path).series("attention.entropy")
    assert found["blocks.0.attention"][0].tolist() == [0, *FIRST_STEPS]


@pytest.mark.parametrize(("start", "expected"), [(12, [12, 16, 20]), (13, [16, 20])])
def test_a_resumed_trainer_samples_where_it_would_have(
    start: int, expected: list[int]
) -> None:
    schedule = Schedule(every=4)
    schedule.continue_at(start)
    assert sampled(schedule, 22 - start) == expected


@given(cost=st.floats(1e-6, 1e3), plain=st.floats(1e-6, 1e3))
def test_the_budget_is_kept(cost: float, plain: float) -> None:
    schedule = Schedule(every=1, budget=0.02)
    schedule.adapt(cost=cost, plain=plain)
    share = cost / (schedule.interval * plain)
    assert share <= 0.02 * 1.25 or schedule.interval == 1


def test_no_budget_changes_nothing() -> None:
    schedule = Schedule(every=3)
    assert schedule.adapt(cost=100.0, plain=1.0) is None and schedule.interval == 3


def test_a_longer_interval_is_reported(tmp_path: Path) -> None:
    _, handle = trained(
        TinyModel, run=tmp_path / "a.eqp", steps=30, every=1, budget=0.001
    )
    assert handle is not None
    run = equipoise.open_run(handle.path)
    (found, *_) = [f for f in run.findings if f.code == "watch.budget"]
    assert (found.params["every"], found.params["budget"]) == (1, 0.001)
    assert len(run.series("attention.entropy")["blocks.0.attention"][0]) < 6
    assert len(run.series("loss")[""][0]) == 30, "what is light is never dropped"


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_run_continues_where_it_stopped(tmp_path: Path, checkpointed: bool) -> None:
    run = tmp_path / "a.eqp"
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for _ in range(2):
        with equipoise.watch(model, optimizer, run=run, every=4) as handle:
            if state is not None and checkpointed:
                handle.load_state_dict(state)
            for batch in batches(6):
                objective(model, batch).backward()
                optimizer.step()
            state = handle.state_dict()
    series = equipoise.open_run(run).series("attention.entropy")
    steps = list(series["blocks.0.attention"][0])
    # Without the checkpoint the count goes on, and the second process samples at once.
    assert steps == ([0, 4, 8] if checkpointed else [0, 4, 6, 10])
    assert list(equipoise.open_run(run).steps) == list(range(12))


@pytest.mark.parametrize("sampled", [True, False])
def test_something_has_happened_and_the_next_step_is_sampled(sampled: bool) -> None:
    schedule = Schedule(every=10)
    for _ in range(0 if sampled else 4):
        schedule.advance()
    assert schedule.due == sampled
    schedule.soon()
    schedule.advance()
    assert schedule.due
    schedule.advance()
    assert not schedule.due and schedule.next_due == schedule.step + 9


def test_a_step_that_ends_inside_our_own_block_is_counted_as_far_as_it_went() -> None:
    """What the block does after the end of the step is of the next one."""

    def busy(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    meter = Meter()
    with meter.running():
        busy(0.02)
        meter.end_step(sampled=True)
        assert meter.cost is not None and meter.cost >= 0.02
        assert meter.ours == 0.0 and meter.plain is not None and meter.plain < 0.02
        busy(0.02)
    assert 0.02 <= meter.ours < meter.cost + 0.02
