"""What bounds a script that is run for a few steps: time, questions, ways out.

A script runs in our process, so what it does to the process is done to us. It may ask
at the keyboard, hang, or leave by ``os._exit``; each ends with one line that says so.
A signal that ends the process (out of memory: SIGKILL) cannot be caught at all.
"""

import builtins
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SETTING_UP_S = 30.0
"""After so long without a step the user is told that the script still runs."""


class TimeIsUp(SystemExit):
    """Ends the user's script where it is, as its last step does."""


class Asked(SystemExit):
    """Ends a script that asks at the keyboard; its code is the question."""


@contextmanager
def limited(seconds: float, steps: Callable[[], int]) -> Iterator[None]:
    """Bound a script's time; answer no question of its; let it leave by no back door.

    Args:
        seconds: From now; 0 is without end. Only the main thread can be bounded.
        steps: How many steps the script has taken.
    """
    told = threading.Timer(SETTING_UP_S, _tell, [steps])
    told.daemon = True
    told.start()
    try:
        with _no_questions(), _no_back_door(steps), _alarm(seconds):
            yield
    finally:
        told.cancel()


def _tell(steps: Callable[[], int]) -> None:
    if not steps():
        line = f"still in set-up after {SETTING_UP_S:.0f} s: no optimiser has stepped"
        print(f"equipoise: {line}", file=sys.stderr, flush=True)


@contextmanager
def _no_questions() -> Iterator[None]:
    asked = builtins.input

    def refuse(prompt: object = "", /) -> NoReturn:
        raise Asked(str(prompt).strip()[:80])

    builtins.input = refuse
    try:
        yield
    finally:
        builtins.input = asked


@contextmanager
def _no_back_door(steps: Callable[[], int]) -> Iterator[None]:
    """Say what happened where a script ends the process without unwinding it."""
    leave, process = os._exit, os.getpid()

    def left(status: int) -> NoReturn:
        if os.getpid() == process:  # a worker's own exit is its own matter
            line = f"the script left by os._exit({status}) after {steps()} steps"
            sys.stdout.flush()
            print(
                f"equipoise: {line}: it cannot be judged", file=sys.stderr, flush=True
            )
            status = status or 1
        leave(status)

    os._exit = left
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the script after some time, and at SIGTERM, by an exception in its thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def ended(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeIsUp(128 + number)

    numbers = (signal.SIGALRM, signal.SIGTERM) if seconds else (signal.SIGTERM,)
    before: dict[int, Any] = {n: signal.signal(n, ended) for n in numbers}
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            with contextlib.suppress(TypeError):  # one that was not set from Python
                signal.signal(number, handler)
