"""Runs and results in a notebook: a stand-in for IPython, and IPython itself."""

import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import equipoise
from equipoise.errors import InputError, RunFileError
from equipoise.judging.verdict import Verdict
from equipoise.numerics.spectra.estimate import Estimate, Status
from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.live import Follower
from equipoise.report.notebook import BROKEN, block
from equipoise.store import RunWriter, open_run
from tests.conftest import PATIENCE
from tests.report.runs import failing_run

INFO = RunInfo(name="<mine>", created="2026-11-17T20:00:00+00:00", version="0.1.0")


class Block:
    """Where a display is shown: keeps every version of it."""

    def __init__(self, first: str) -> None:
        self.versions, self.changed = [first], threading.Condition()

    def update(self, text: str) -> None:
        with self.changed:
            self.versions.append(text)
            self.changed.notify_all()

    def until(self, wanted: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: wanted in self.versions[-1], PATIENCE)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Stand in for IPython in a notebook."""
    shown: list[Block] = []

    def display(text: str, *, display_id: bool) -> Block:
        assert display_id
        shown.append(Block(text))
        return shown[-1]

    top, inside = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    top.get_ipython = lambda: object()  # type: ignore[attr-defined]
    inside.display, inside.HTML = display, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", top)
    monkeypatch.setitem(sys.modules, "IPython.display", inside)
    return shown


def test_a_block_is_redrawn_in_place_until_the_run_ends(
    tmp_path: Path, blocks: list[Block]
) -> None:
    with RunWriter(tmp_path / "x.eqp", INFO) as writer:
        shown = equipoise.show(tmp_path / "x.eqp", refresh=0.05)
        assert "no step yet" in blocks[0].versions[0]
        writer.append([Reading.scalar(0, "loss", 2.0)])
        blocks[0].until("live · step 0")
        writer.append([Reading.scalar(1, "loss", 1.0)])
        blocks[0].until("live · step 1")
    blocks[0].until("finished · step 1")
    shown.stop()
    assert len(blocks) == 1 and threading.active_count() < 50
    assert "&lt;mine&gt;" in blocks[0].versions[-1]


def test_stop_and_a_deleted_file_end_it(tmp_path: Path, blocks: list[Block]) -> None:
    writer = RunWriter(tmp_path / "x.eqp", INFO)
    shown = equipoise.show(open_run(tmp_path / "x.eqp"), refresh=60)
    writer.append([Reading.scalar(7, "loss", 2.0)])
    start = time.monotonic()
    shown.stop()  # draws once more, and does not wait for the minute
    assert "step 7" in blocks[0].versions[-1] and time.monotonic() - start < 50
    again = equipoise.show(tmp_path / "x.eqp", refresh=0.05)
    writer.close()
    again.stop()
    assert "finished" in blocks[1].versions[-1]


def test_show_takes_a_handle_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    handle = types.SimpleNamespace(path=failing_run(tmp_path / "x.eqp", steps=20).path)
    equipoise.show(handle)  # no notebook here: printed once
    assert "post-LN" in capsys.readouterr().out
    with pytest.raises(InputError, match="given a int"):
        equipoise.show(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="refresh"):
        equipoise.show(handle, refresh=0)
    with pytest.raises(RunFileError):
        equipoise.show(tmp_path / "absent.eqp")


def test_a_block_stands_alone_and_escapes_what_comes_from_a_run(tmp_path: Path) -> None:
    bad = Finding(step=0, severity="warn", code="x", site="<b>", message="<script>")
    with RunWriter(tmp_path / "x.eqp", INFO) as writer:
        losses = [Reading.scalar(s, "loss", v) for s, v in enumerate((2, float("nan")))]
        writer.append(losses, findings=[bad])
    text = block(Follower(open_run(tmp_path / "x.eqp")).look())
    assert "<script" not in text and "<b>:" not in text and "http" not in text
    assert f'stroke="{BROKEN}"' in text  # the step that is not finite
    assert text.count("<svg") == 1 and "&lt;script&gt;" in text


def test_results_show_themselves(tmp_path: Path) -> None:
    run = failing_run(tmp_path / "post.eqp", steps=60)
    assert repr(run).startswith("Run('post-LN', finished, step 59")
    html = run._repr_html_()
    assert "gradient.norm" in html and run.verdict.state in html
    run.path.unlink()
    assert "unreadable" in repr(run)
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.7, 0.7]])
    found = equipoise.balance(rows)
    assert repr(found) == (
        "Balance(rows (3,), θ 0 to 1, exact 2 of 3, not a distribution (NaN) 1)"
    )
    assert "<td>2 of 3</td>" in found._repr_html_()
    sure = Estimate(value=2.0, status=Status.EXACT, steps=3, residual=0.1, error=0.05)
    assert repr(sure) == "Estimate(2 ± 0.1, exact, 3 steps)"
    assert "1.9 and 2.1" in sure._repr_html_()
    verdict = Verdict(state="at risk", sentence="x < y", since=3, advice="wait")
    assert repr(verdict) == "Verdict('at risk', 'x < y', since step 3)"
    assert "x &lt; y" in verdict._repr_html_() and "wait" in verdict._repr_html_()
    assert "<td>norm.eps</td>" in equipoise.plan(2, 8, 2)._repr_html_()


CELL = """
import torch, equipoise
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
optimizer = torch.optim.AdamW(model.parameters())
handle = equipoise.watch(model, optimizer, run=RUN, every=2, quiet=True)
handles.append(handle)
for _ in range(3):
    x = torch.randint(0, 32, (2, 8))
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
handle
"""


def test_in_ipython_a_cell_run_again_closes_the_watch_before(tmp_path: Path) -> None:
    config = Config({"HistoryManager": {"enabled": False}})
    # A module of its own: by default IPython takes the place of __main__.
    shell = InteractiveShell(config=config, user_module=types.ModuleType("cell"))
    shell.push({"RUN": str(tmp_path / "x.eqp"), "handles": []})
    for _ in range(2):
        result = shell.run_cell(CELL, store_history=True)
        result.raise_error()
    first, second = shell.user_ns["handles"]
    assert first.closed and not second.closed
    assert "Watch(GPT2LMHeadModel, watching, step 6" in repr(result.result)
    shown, _ = shell.display_formatter.format(result.result)
    assert "<td>watching</td>" in shown["text/html"]
    second.close()
    assert len(open_run(tmp_path / "x.eqp").series("loss")[""][0]) == 6
