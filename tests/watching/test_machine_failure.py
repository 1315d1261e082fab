"""The machine's own failure, users' callbacks that raise or close, and what is left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

import equipoise
from equipoise.watching import Watch
from tests.watching.models import TinyModel, batches, declared, hooks_on, objective


def watched(path: Path, **options: Any) -> tuple[TinyModel, Any, Watch]:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with declared():
        run = path / "a.eqp"
        handle = equipoise.watch(model, optimizer, run=run, every=1, **options)
    return model, optimizer, handle


def step(model: TinyModel, optimizer: Any, batch: torch.Tensor) -> None:
    objective(model, batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


EFFECTS = {
    "arm": "_sampler",
    "attach_probes": "_sampler",
    "read_gradients": "_sampler",
    "copy_weights": "_sampler",
    "finish": "_sampler",
    "check_loss": "_nonfinite",
    "write_arrived": "_recorder",
    "advance": "_schedule",
    "pass_begins": "marks",
}
"""What may fail → where it is."""


@pytest.mark.parametrize(("what", "where"), EFFECTS.items())
def test_the_machines_own_failure_detaches_and_the_training_goes_on(
    what: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, handle = watched(tmp_path)
    post = len(_global_optimizer_post_hooks)
    owner = handle._observer.marks if where == "marks" else getattr(handle, where)

    def fail(self: Any, *given: Any, **named: Any) -> None:
        raise ZeroDivisionError("our mistake")

    for number, batch in enumerate(batches(4)):
        if number == 1:
            monkeypatch.setattr(type(owner), what, fail)
        step(model, optimizer, batch)
        assert handle.closed == (number >= 1)
    assert hooks_on(model) == 0 and torch._C._len_torch_function_stack() == 0
    assert len(_global_optimizer_post_hooks) == post - 1
    found = [f for f in handle.findings if f.code == "probe.failed.watch"]
    assert [f.step for f in found] == [1] and "our mistake" in str(found[0].params)
    handle.close()
    assert equipoise.open_run(handle.path).findings == list(handle.findings)


def test_the_users_exception_leaves_nothing_of_ours_undone(tmp_path: Path) -> None:
    """The step is recorded, and the next has begun."""
    model, optimizer, handle = watched(tmp_path)
    seen: list[tuple[int, bool]] = []

    def call(number: int, sampled: bool) -> None:
        seen.append((number, sampled))
        if number == 1:
            raise KeyError("theirs")

    handle.on_step_end(call)
    for number, batch in enumerate(batches(3)):
        if number == 1:
            with pytest.raises(KeyError, match="theirs"):
                step(model, optimizer, batch)
            optimizer.zero_grad()
        else:
            step(model, optimizer, batch)
    handle.close()
    assert seen == [(0, True), (1, True), (2, True)] and not handle.findings
    run = equipoise.open_run(handle.path)
    assert list(run.series("gradient.norm")["head"][0]) == [0, 1, 2]


@pytest.mark.parametrize("other_hook", [False, True])
def test_a_callback_may_close_the_watch_while_torch_runs_its_hooks(
    other_hook: bool, tmp_path: Path
) -> None:
    """torch goes through its hooks just then: another's, after ours, still runs."""
    before = len(_global_optimizer_post_hooks)
    model, optimizer, handle = watched(tmp_path)
    ran: list[Any] = []
    theirs = None
    if other_hook:
        theirs = register_optimizer_step_post_hook(lambda *given: ran.append(given))
    handle.on_step_end(lambda number, sampled: handle.close())
    for batch in batches(2):
        step(model, optimizer, batch)
    assert handle.closed and handle.current_step == 1
    assert len(ran) == 2 * other_hook
    again = equipoise.watch(model, optimizer, run=tmp_path / "b.eqp", every=1)
    step(model, optimizer, batches(1)[0])
    again.close()
    assert again.current_step == 1, "an event came twice, or not at all"
    if theirs is not None:
        theirs.remove()
    assert len(_global_optimizer_post_hooks) == before


def test_queries_write_nothing_and_call_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    model, optimizer, handle = watched(tmp_path, on_finding=told.append)
    step(model, optimizer, batches(1)[0])

    def fail(*given: Any, **named: Any) -> None:
        raise AssertionError("a query has called it")

    for owner, name in (
        (handle._recorder.writer, "write"),
        (handle._recorder.ranks, "exchange"),
        (handle, "_write_arrived"),
    ):
        monkeypatch.setattr(type(owner), name, fail)
    handle.reporter._untold.append(equipoise.Finding.info(0, "watch.modules"))
    state = handle._step
    assert handle.verdict.step == 0 and handle.findings == ()
    assert not handle.should_stop and "TinyModel" in repr(handle)
    assert handle.card and handle._repr_html_() and handle.sampling
    assert not told and handle._step is state
    monkeypatch.undo()
    handle.flush()
    assert len(told) == 1
    handle.close()


def test_a_strict_failure_leaves_none_of_the_other_effects_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception reaches the user once everything else is done."""
    model, optimizer, handle = watched(tmp_path, strict=True)

    def fail(self: Any, *given: Any, **named: Any) -> None:
        raise ZeroDivisionError("our mistake")

    for number, batch in enumerate(batches(3)):
        if number == 1:
            with monkeypatch.context() as patched:
                patched.setattr(type(handle._sampler), "finish", fail)
                with pytest.raises(ZeroDivisionError, match="our mistake"):
                    step(model, optimizer, batch)
            optimizer.zero_grad()
        else:
            step(model, optimizer, batch)
        assert handle.current_step == number + 1 and handle.sampling
    handle.close()
    assert list(equipoise.open_run(handle.path).series("loss")[""][0]) == [0, 1, 2]
