"""Readings reach the real loggers, in a temporary directory, without a network."""

import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equipoise.errors import InputError, MissingExtraError
from equipoise.records import Reading
from equipoise.sinks import SINKS, IsolatedSink, by_step, open_sinks, sink
from tests.conftest import PATIENCE

STEPS = {0: {"loss": 2.5, "norm/h.0": 1e-3}, 10: {"loss": math.nan, "norm/h.0": 4.0}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "mine.eqp"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B talks to its own helper on the loopback; nothing may go further."""
    connect = socket.socket.connect

    def near(self: socket.socket, address: object) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1")
        assert local, f"a sink called {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", near)


def fill(target: object, run: Path) -> None:
    opened = sink(target, run=run)
    for step, values in STEPS.items():
        opened.log(values, step)
    getattr(opened, "close", lambda: None)()


def test_numbers_are_means_over_heads() -> None:
    values = ((1.0, 3.0), (math.nan, 1.0))
    per_head = Reading(step=0, quantity="q", sites=("a", "b"), values=values)
    found = by_step([Reading.scalar(0, "loss", 2.0), per_head])[0]
    assert list(found) == ["loss", "q/a", "q/b"]
    assert (found["loss"], found["q/a"]) == (2.0, 2.0) and math.isnan(found["q/b"])


def test_callable(run: Path) -> None:
    seen = {}
    fill(lambda values, step: seen.update({step: dict(values)}), run)
    assert seen == STEPS


def test_a_users_own_sink_is_used_as_it_is(run: Path) -> None:
    class Mine:
        def log(self, values, step):
            self.last = step

        def close(self):
            self.closed = True

    mine = Mine()
    fill(mine, run)
    assert mine.last == 10 and mine.closed


def test_jsonl(run: Path, tmp_path: Path) -> None:
    fill("jsonl", run)
    fill(f"jsonl:{tmp_path / 'deep' / 'other.txt'}", run)
    lines = (tmp_path / "mine.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "loss": 2.5, "norm/h.0": 0.001}
    assert json.loads(lines[1])["loss"] == "nan"
    assert len((tmp_path / "deep" / "other.txt").read_text().splitlines()) == 2


def test_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill("tensorboard", run)
    found = EventAccumulator(str(run.with_suffix(""))).Reload()
    norms = [(e.step, e.value) for e in found.Scalars("norm/h.0")]
    assert norms == [(0, pytest.approx(1e-3)), (10, 4.0)]
    assert math.isnan(found.Scalars("loss")[1].value)


def test_mlflow(run: Path) -> None:
    import mlflow

    fill("mlflow", run)
    client = mlflow.MlflowClient(run.with_suffix("").resolve().as_uri())
    experiment = client.get_experiment_by_name("equipoise")
    (made,) = client.search_runs([experiment.experiment_id])
    assert made.info.run_name == "mine" and made.info.status == "FINISHED"
    history = client.get_metric_history(made.info.run_id, "norm/h.0")
    assert [(m.step, m.value) for m in history] == [(0, 1e-3), (10, 4.0)]


def test_mlflow_joins_the_active_run(run: Path, tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "theirs").resolve().as_uri())
    try:
        fill("mlflow", run)  # configured, but nothing active: a new run in theirs
        with mlflow.start_run() as active:
            fill("mlflow", run)
            assert mlflow.active_run() is not None
        history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "loss")
        assert [m.step for m in history] == [0, 10]
        assert mlflow.get_experiment_by_name("equipoise") is not None
    finally:
        mlflow.set_tracking_uri(None)
    assert not run.with_suffix("").exists()


@pytest.mark.parametrize("stride", [1, 7, 40])
def test_wandb_beside_a_script_that_logs_by_itself(
    run: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """Nothing of theirs is ignored, whether they log more often than we do or less."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    theirs = wandb.init(mode="offline", dir=run.parent)
    opened = sink("wandb", run=run)
    for step in range(40):
        opened.log({"loss": step / 8}, step)
        if step % stride == 0:
            theirs.log({"mine": step}, step=step // stride)
            assert theirs.step == step // stride
    opened.close()
    theirs.log({"mine": 99}, step=39 // stride + 1)
    assert theirs.step == 39 // stride + 1  # W&B would ignore an earlier one
    seen = theirs.summary["equipoise/step"]
    theirs.finish()
    assert seen == {1: 39, 7: 39, 40: 0}[stride]


def test_wandb_in_a_run_without_other_logs_gets_every_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    theirs = wandb.init(mode="offline", dir=run.parent)
    opened = sink(theirs, run=run)  # the run itself means the same
    for step in range(12):
        opened.log({"loss": step / 8}, step)
    assert theirs.step == 0
    opened.close()
    theirs.log({"mine": 1}, step=0)  # they may still log at their first step
    opened.write_rows()  # as the interpreter ends
    assert theirs.step == 11
    theirs.finish()
    opened.write_rows()  # nothing is left, and the run is finished


def test_wandb_stays_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    fill("wandb", run)
    (folder,) = (run.with_suffix("") / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    # Its helper process writes after finish() returns.
    deadline = time.monotonic() + PATIENCE
    while b"norm/h.0" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"norm/h.0" in log.read_bytes()


def test_unknown_and_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="one of jsonl, mlflow, tensorboard, wandb"):
        sink("tensorbored", run=run)
    monkeypatch.delitem(sys.modules, "equipoise.sinks.wandb", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"equipoise\[loggers\]"):
        sink("wandb", run=run)


class Failing:
    """Fails at some calls, counted from 0."""

    def __init__(self, *at: int) -> None:
        self.at, self.calls, self.got = at, 0, []

    def log(self, values, step):
        self.calls += 1
        if self.calls - 1 in self.at:
            raise ConnectionError("no route to host")
        self.got.append(step)


def test_a_hiccup_is_tried_again() -> None:
    mine = Failing(1)
    isolated = IsolatedSink("mine", mine)
    assert [isolated.log({step: {"loss": 1.0}}) for step in range(4)] == [[]] * 4
    assert mine.got == [0, 1, 2, 3]


def test_a_sink_that_fails_is_one_finding_and_is_tried_after_pauses() -> None:
    mine = Failing(*range(4, 30))
    isolated = IsolatedSink("mine", mine)
    found = [f for step in range(200) for f in isolated.log({step: {"loss": 1.0}})]
    assert [f.code for f in found] == ["sink.failed"]
    assert found[0].step == 4 and "no route to host" in str(found[0].params["error"])
    assert mine.got[:4] == [0, 1, 2, 3] and mine.calls < 80
    assert isolated.close(200) == []  # it has no close()


def test_closing_may_fail_too() -> None:
    class Unclosable(Failing):
        def close(self):
            raise OSError("gone")

    (found,) = IsolatedSink("mine", Unclosable()).close(7)
    assert found.step == 7 and found.params["error"] == "OSError('gone')"


@pytest.mark.parametrize("wrong", [3, None, object(), "wanbd", ("jsonl",)])
def test_what_cannot_be_a_sink_is_refused_before_any_is_opened(
    wrong: object, run: Path
) -> None:
    with pytest.raises(InputError, match="no sink"):
        open_sinks(["jsonl", wrong], run=run)
    assert not list(run.parent.iterdir())


def test_only_what_is_asked_for_is_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from equipoise.sinks import sink; "
        "sink(print, run=Path('a.eqp')); "
        f"assert not {set(SINKS) | {'torch'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
