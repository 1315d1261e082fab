"""A sink or a disk that fails is a finding; training, file and other sinks go on."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise
from equipoise.errors import InputError, MissingExtraError, RunFileError


def trained(handle_of, steps: int = 12, after=lambda handle, step: None):
    """Train a small model, calling ``after(handle, step)`` behind every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = handle_of(model, optimizer)
    for step in range(steps):
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(handle, step)
    handle.close()
    return handle


def about_files(findings) -> list[equipoise.Finding]:
    return [f for f in findings if f.code.startswith(("sink.", "store."))]


def test_one_failing_sink_is_one_finding_and_the_others_go_on(tmp_path: Path) -> None:
    calls: list[int] = []

    def failing(values, step):
        raise ConnectionError("no route to host")

    run = tmp_path / "a.eqp"
    handle = trained(
        lambda model, optimizer: equipoise.watch(
            model,
            optimizer,
            run=run,
            every=3,
            sinks=["jsonl", failing, lambda values, step: calls.append(step)],
        )
    )
    (found,) = about_files(handle.findings)
    assert found.code == "sink.failed" and found.params["sink"] == "failing"
    reader = equipoise.open_run(run)
    assert len(reader.series("loss")[""][0]) == 12
    assert about_files(reader.findings) == [found]
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(12)) == calls


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"on_finding": 3}, InputError),
        ({"sinks": [3]}, InputError),
        ({"sinks": ["wanbd"]}, InputError),
        ({"sinks": "wanbd"}, InputError),
        ({"sinks": ["wandb"]}, MissingExtraError),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    options: dict[str, object],
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "equipoise.sinks.wandb", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    model = nn.Linear(2, 2)
    with pytest.raises(error):
        equipoise.watch(model, run=tmp_path / "a.eqp", **options)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_once_loses_no_step(tmp_path: Path) -> None:
    run = tmp_path / "a.eqp"

    def limit(handle, step: int) -> None:
        db = handle._recorder.writer._run._writer._file.db
        if step == 20:
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages}")
        if step == 150:
            db.execute("PRAGMA max_page_count = 1000000")

    handle = trained(
        lambda model, optimizer: equipoise.watch(model, optimizer, run=run, every=2),
        steps=200,
        after=limit,
    )
    rules = [f.code for f in about_files(handle.findings)]
    assert rules == ["store.not_written", "store.written_again"]
    assert len(equipoise.open_run(run).series("loss")[""][0]) == 200


@pytest.mark.parametrize("gone", ["file", "directory"])
def test_a_lost_file_is_an_error_finding(tmp_path: Path, gone: str) -> None:
    run = tmp_path / "runs" / "a.eqp"

    def lose(handle, step: int) -> None:
        if step == 20:
            run.unlink() if gone == "file" else shutil.rmtree(run.parent)

    handle = trained(
        lambda model, optimizer: equipoise.watch(model, optimizer, run=run, every=2),
        steps=40,
        after=lose,
    )
    (lost,) = about_files(handle.findings)
    assert lost.code == "store.file_lost" and lost.severity == "error"
    assert len(equipoise.open_run(run).series("loss")[""][0]) == 40


def test_a_run_that_cannot_be_written_is_refused_with_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFileError, match="cannot be written"):
        equipoise.watch(nn.Linear(2, 2), run=tmp_path / "file" / "a.eqp")
