"""``equipoise live RUN``: follow a run on a terminal, over SSH too."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from equipoise.cli.arguments import RunOrFolder, opened_run
from equipoise.report.live import Follower, LiveView
from equipoise.report.live_screen import Screen, frame

EXAMPLES = (
    "equipoise live",
    "equipoise live runs/mine.eqp --refresh 5",
    "equipoise live --once | less",
)
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The second screen of a terminal without a cursor, and back."""
QUIT, PAUSE = {"q", "Q", "\x03", "\x1b"}, {" ", "p"}
KEYS = "space pause · q quit"
PAUSED = "PAUSED, the run goes on · space resume · q quit"
SLICE = 0.5
"""Seconds between looks at the size of the window."""


def command(
    run: RunOrFolder = None,
    *,
    refresh: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two updates.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the current state, and end.")
    ] = False,
) -> None:
    """Follow a run: loss, verdict, worst layers, findings. space pauses, q quits.

    Without colour where NO_COLOR is set or the terminal is dumb. Into a pipe or a file
    it prints a screen whenever something is new, and ends with the run.
    """
    follower = Follower(opened_run(run))
    if once:
        print_frame(follower.look())
    elif _is_terminal():
        follow(follower, refresh)
    else:
        print_on(follower, refresh)


def _is_terminal() -> bool:
    dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
    return sys.stdin.isatty() and sys.stdout.isatty() and not dumb and _has_termios()


def _has_termios() -> bool:
    try:
        import termios  # not on Windows
    except ImportError:
        return False
    return bool(termios)


def screen() -> Screen:
    """Return the abilities of standard output: colour, Unicode, size."""
    size = shutil.get_terminal_size((80, 24))
    dumb = os.environ.get("TERM", "dumb") in ("", "dumb")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and not dumb
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return Screen(
        width=max(20, size.columns),
        height=max(6, size.lines),
        colour=colour,
        unicode=encoding.startswith("utf"),
    )


def print_frame(view: LiveView) -> None:
    """Print how a run stands, below what was printed before."""
    typer.echo("\n".join(frame(view, screen())))


def print_on(follower: Follower, refresh: float) -> None:
    """Print a screen whenever a step was recorded, until the run has ended."""
    shown: tuple[object, ...] | None = None
    while True:
        view = follower.look()
        now = (view.step, len(view.findings), view.state)
        if now != shown:
            typer.echo(("\n" if shown else "") + "\n".join(frame(view, screen())))
            sys.stdout.flush()
            shown = now
        if view.state != "live":
            return
        time.sleep(refresh)


def follow(follower: Follower, refresh: float) -> None:
    """Redraw one screen until a key ends it; the terminal is left as it was."""
    with taken_terminal():
        view, paused = follower.look(), False
        due = time.monotonic() + refresh
        draw(view, paused=paused)
        while True:
            key = pressed(min(SLICE, max(0.0, due - time.monotonic())))
            if key in QUIT:
                return
            paused ^= key in PAUSE
            if time.monotonic() >= due and not paused:
                view = follower.look()
                due = time.monotonic() + refresh
            elif paused:
                due = time.monotonic() + SLICE
            draw(view, paused=paused)


def draw(view: LiveView, *, paused: bool) -> None:
    """Draw over the last screen without a flicker: line by line, nothing cleared."""
    lines = frame(view, screen(), keys=PAUSED if paused else KEYS)
    sys.stdout.write("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")
    sys.stdout.flush()


def pressed(seconds: float) -> str:
    """Return the key pressed within some seconds, or nothing."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
    if not ready:
        return ""
    # Not through sys.stdin: it would keep what it read ahead from the next select.
    keys = os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
    return "q" if not keys else keys[0] if len(keys) == 1 else _first_known(keys)


def _first_known(keys: str) -> str:
    """Return the first key we know among several; arrows and the like are none."""
    if keys.startswith("\x1b"):
        return ""
    return next((key for key in keys if key in QUIT | PAUSE), "")


@contextmanager
def taken_terminal() -> Iterator[None]:
    """Read single keys and draw on the second screen; give both back, come what may."""
    import termios  # not on Windows
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    # SIGINT too: what a script starts in the background inherits it as ignored.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, _ended) for number in ends}
    try:
        tty.setcbreak(keyboard)
        _ignore_suspend(keyboard)
        sys.stdout.write(ENTER)
        yield
    except KeyboardInterrupt:  # Ctrl-C ends it as q does
        pass
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore_suspend(keyboard: int) -> None:
    """Ctrl-Z would leave the shell on our screen, without a cursor."""
    import termios

    modes = termios.tcgetattr(keyboard)
    modes[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def _ended(number: int, stack: Any) -> None:
    """Leave as Ctrl-C does when the connection or the session ends."""
    raise KeyboardInterrupt
