"""``equipoise live``: a real terminal, small ones, none at all."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise import cli
from equipoise.cli import live
from equipoise.records import Finding, Reading, RunInfo
from equipoise.report.live import Follower
from equipoise.report.live_screen import Screen, frame
from equipoise.store import RunWriter, open_run
from tests.conftest import PATIENCE
from tests.report.runs import failing_run

INFO = RunInfo(name="mine", created="2026-11-17T20:00:00+00:00", version="0.1.0")
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A pseudo-terminal with a command on it."""

    def __init__(self, arguments: list[str], *, size: tuple[int, int]) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.modes = termios.tcgetattr(theirs)
        self.theirs, self.text = theirs, ""
        code = "from equipoise.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": ""},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # for Ctrl-C
        )

    def until(self, wanted: str) -> str:
        """Read until something is on the screen; return what came meanwhile."""
        start, end = len(self.text), time.monotonic() + PATIENCE
        while wanted not in ANSI.sub("", self.text[start:]):
            assert time.monotonic() < end, f"no {wanted!r} in {self.text[start:]!r}"
            if select.select([self.ours], [], [], 1)[0]:
                self.text += os.read(self.ours, 65536).decode()
        return self.text[start:]

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def left(self) -> int:
        """Wait for the command to end; return its exit code."""
        while self.process.poll() is None:
            if select.select([self.ours], [], [], 0.2)[0]:
                self.text += os.read(self.ours, 65536).decode()
        while select.select([self.ours], [], [], 0)[0]:
            self.text += os.read(self.ours, 65536).decode()
        return self.process.returncode


@contextmanager
def terminal(*words: str, size: tuple[int, int] = (24, 80)) -> Iterator[Terminal]:
    opened = Terminal(["live", *words], size=size)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.ours)
        os.close(opened.theirs)


def frames(text: str) -> list[list[str]]:
    return [ANSI.sub("", part).split("\r\n") for part in text.split("\x1b[H")[1:]]


def test_it_follows_pauses_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mine.eqp"
    with RunWriter(path, INFO) as writer:
        writer.append([Reading.scalar(7, "loss", 2.5)])
        with terminal(str(tmp_path), "--refresh", "0.2") as shown:
            shown.until("step 7")
            writer.append([Reading.scalar(8, "loss", 2.25)])
            shown.until("step 8")
            shown.press(" ")
            shown.until("PAUSED")
            writer.append([Reading.scalar(9, "loss", 2.0)])
            assert "step 9" not in shown.until("PAUSED") + shown.until("PAUSED")
            shown.press(" ")
            shown.until("step 9")
            shown.press("q")
            assert shown.left() == 0
            assert termios.tcgetattr(shown.theirs) == shown.modes
    assert shown.text.startswith(live.ENTER) and shown.text.endswith(live.LEAVE)
    assert all(len(f) == 24 and max(map(len, f)) <= 80 for f in frames(shown.text))


@pytest.mark.parametrize("how", ["\x03", signal.SIGTERM])
def test_an_interruption_ends_it_as_q_does(tmp_path: Path, how: str | int) -> None:
    RunWriter(tmp_path / "mine.eqp", INFO).close()
    # As from a script that runs in the background: Ctrl-C is inherited as ignored.
    theirs = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with terminal(str(tmp_path / "mine.eqp")) as shown:
        signal.signal(signal.SIGINT, theirs)
        shown.until("no step yet")
        if isinstance(how, str):
            shown.press(how)
        else:
            shown.process.send_signal(how)
        assert shown.left() == 0 and "Traceback" not in shown.text
        assert shown.text.endswith(live.LEAVE)
        assert termios.tcgetattr(shown.theirs) == shown.modes


def test_the_screen_shows_verdict_worst_layers_and_findings(tmp_path: Path) -> None:
    view = Follower(failing_run(tmp_path / "post.eqp", steps=120)).look()
    lines = frame(view, Screen(colour=False), keys="q quit")
    text = "\n".join(lines)
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith("post-LN") and "finished · step 119" in lines[0]
    assert view.verdict.state.upper() in lines[2]
    assert "gradient.norm blocks.0 " in text  # the vanished layer, not the last one
    assert "error step 50 blocks.0: The first layer's gradient" in text
    assert "…ocks.23.attention" in text or ".attention " in text
    assert all(f in view.findings for f in view.verdict.findings)
    assert lines[-1] == "q quit" and "\x1b" not in text
    assert "\x1b[31m" in "\n".join(frame(view, Screen(colour=True)))


def test_worst_is_a_layer_and_each_finding_stands_once(tmp_path: Path) -> None:
    info = RunInfo(
        name="a", created="", version="0", details={"blocks": ["h.0", "h.1"]}
    )
    sites, values = ("embed", "h.0", "h.1"), ((1e-12,), (1e-7,), (1.0,))
    with RunWriter(tmp_path / "a.eqp", info) as writer:
        for step in range(20):
            norms = Reading(
                step=step, quantity="gradient.norm", sites=sites, values=values
            )
            writer.append([Reading.scalar(step, "loss", 3.0 - step / 20), norms])
    first = Follower(open_run(tmp_path / "a.eqp")).look()
    (fired,) = [f for f in first.findings if f.code == "gradient.vanished"]
    old = replace(fired, message="in other words", params={"since": fired.since})
    with RunWriter(tmp_path / "a.eqp", info) as writer:
        writer.append([], findings=[old])
    view = Follower(open_run(tmp_path / "a.eqp")).look()
    (curve,) = [c for c in view.worst if c.quantity == "gradient.norm"]
    assert (curve.site, curve.value) == ("h.0", 1e-7)
    assert [f.code for f in view.findings].count("gradient.vanished") == 1


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (200, 60)])
def test_every_terminal_size_is_filled(tmp_path: Path, size: tuple[int, int]) -> None:
    view = Follower(failing_run(tmp_path / "post.eqp", steps=30)).look()
    lines = frame(view, Screen(width=size[0], height=size[1]), keys="q quit")
    assert len(lines) == size[1]
    assert max(len(ANSI.sub("", line)) for line in lines) <= size[0]


def test_names_cannot_move_the_cursor_and_ascii_is_enough(tmp_path: Path) -> None:
    info = RunInfo(name="evil\x1b[2J", created=INFO.created, version="0.1.0")
    bad = Finding(step=0, severity="warn", code="x", message="clear\x1b[2J θ")
    with RunWriter(tmp_path / "x.eqp", info) as writer:
        losses = [
            Reading.scalar(s, "loss", v) for s, v in enumerate((2, 1, float("nan")))
        ]
        writer.append(losses, findings=[bad])
    view = Follower(open_run(tmp_path / "x.eqp")).look()
    text = "\n".join(frame(view, Screen(colour=False, unicode=False)))
    assert text.isascii() and "\x1b" not in text and "#_!" in text


def test_into_a_pipe_it_prints_and_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "x.eqp", INFO)
    writer.append([Reading.scalar(0, "loss", 2.0)])
    later = iter(
        [
            lambda: writer.append([Reading.scalar(1, "loss", 1.0)]),
            lambda: writer.close(),
        ]
    )
    monkeypatch.setattr(live.time, "sleep", lambda seconds: next(later)())
    with pytest.raises(SystemExit) as left:
        cli.main(["live", str(tmp_path)])
    out = capsys.readouterr().out
    assert left.value.code in (0, None) and "\x1b" not in out
    assert [f"step {n}" in out for n in (0, 1)] == [True, True] and "finished" in out


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunWriter(tmp_path / "x.eqp", INFO) as writer:
        writer.append([Reading.scalar(3, "loss", 2.0)])
        with pytest.raises(SystemExit):
            cli.main(["live", str(tmp_path), "--once"])
    assert "live · step 3" in capsys.readouterr().out
