"""Runs programs in a process apart, which is ended when one takes too long.

The other side of it is ``python -m equipoise_lab.mistakes.worker``: it reads what to
run from its input, one program a line, and answers each with a line, its outcome. A
program that ends its process, or hangs, is an outcome with an error; the next one gets
a new process.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from equipoise_lab.mistakes.case import CASES, Case
from equipoise_lab.mistakes.running import Outcome, load, outcome

PROGRAM_SECONDS = 600.0
"""A program that takes longer is ended, with all its ranks: 200 times a usual one."""


class Worker:
    """One process at a time; close it, so that none is left behind."""

    def __init__(self, *, limit: float = PROGRAM_SECONDS) -> None:
        self.limit = limit
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, case: Case, *, wrong: bool, **options: Any) -> Outcome:
        """Run a program under the instrument, and return what was found."""
        process = self._process = self._process or _started()
        assert process.stdin is not None and process.stdout is not None
        asked = {
            "case": case.name,
            "half": case.half,
            "wrong": wrong,
            "options": options,
        }
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asked), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], self.limit)
        line = process.stdout.readline() if ready else ""
        if line:
            return Outcome(**json.loads(line))
        error = f"TimeoutExpired: after {self.limit:.0f} s"
        if ready:
            error = f"the process ended with code {process.wait()}"
        self.close()
        return Outcome(case=case.name, wrong=wrong, state="", error=error)

    def close(self) -> None:
        """End the process and the ranks that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _started() -> subprocess.Popen[str]:
    # A session of its own: its ranks belong to it, and end with it.
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise_lab.mistakes.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def main() -> None:
    """Answer every line of the input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what programs print
    for line in sys.stdin:
        asked = json.loads(line)
        load(asked["half"])
        case = CASES[asked["case"]]
        found = outcome(case, wrong=asked["wrong"], **asked["options"])
        print(json.dumps(asdict(found)), file=answers, flush=True)


if __name__ == "__main__":
    main()
