"""Every class of ``transformers``' auto-mappings, built small: what is read of each.

``./dev bench zoo`` examines class by class (``tests/zoo/constructed``) in a process of
its own, replaced after each shard, after a class that took too long or too much memory,
and after one that took it down. Rows are kept as they come, under a hash of the code
that made them: begun again it goes on where it stopped. ``python -m benchmarks.zoo
NAME …`` examines only these, and prints them.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results"
SHARD, SECONDS, MEMORY = 150, 600, 12 << 30
CODE = ("src/equipoise", "tests/zoo/constructed", "tests/oracles")
LOST = "it took its process down, or too long"
Row = dict[str, Any]


def code_hash() -> str:
    """Return a hash of the code and the package that decide a row."""
    from importlib.metadata import version

    found = hashlib.sha256(f"{version('transformers')} {version('torch')}".encode())
    for place in CODE:
        for file in sorted((ROOT / place).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


class Worker:
    """A process that examines the classes it is given, one line each way."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.zoo", "--worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
        self._rows: Queue[str] = Queue()
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._out:
            self._rows.put(line)
        self._rows.put("")

    @property
    def _out(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def line(self) -> str:
        """Return the next line that it prints; nothing if it died or took too long."""
        try:
            return self._rows.get(timeout=SECONDS)
        except Empty:
            return ""

    def examined(self, name: str) -> Row | None:
        """Return a class's row; None if it took the process down or too long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self.line()
        return json.loads(line) if line else None

    def replaced(self) -> "Worker":
        """Return another one in its place, which has said what it knows."""
        self.end()
        other = Worker()
        other.line()
        return other

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Examine what is asked for on standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rows, sys.stdout = sys.stdout, sys.stderr  # models print too
    from tests.zoo.constructed.examination import is_trained, row_of
    from tests.zoo.constructed.subjects import subjects

    known = subjects()
    print(json.dumps(list(known)), file=rows, flush=True)
    for line in sys.stdin:
        name = line.strip()
        row = row_of(known[name], train=is_trained(name))
        print(json.dumps(row), file=rows, flush=True)


def examined(wanted: Sequence[str] | None, done: Collection[str]) -> Iterator[Row]:
    """Yield a row for each class; a worker that dies takes no other class along."""
    worker = Worker()
    known = json.loads(worker.line() or "[]")
    yield {"names": known}
    left = [name for name in wanted or known if name not in done]
    for place, name in enumerate(left):
        if place and not place % SHARD:
            worker = worker.replaced()
        row = worker.examined(name)
        if row is None:
            worker = worker.replaced()
        yield row or {"class": name, "status": "failed", "why": LOST}
    worker.end()


def main() -> None:
    path = KEPT / f"zoo-{code_hash()}.tmp"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {row["class"]: row for row in map(json.loads, lines)}
    rows = examined(None, done)
    every = next(rows)["names"]
    for row in rows:
        done[row["class"]] = row
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row["class"], row["status"], row.get("why", ""), flush=True)
    published([done[name] for name in every])


def published(rows: Sequence[Row]) -> None:
    """Print the rows and write them for the page."""
    from importlib.metadata import version

    from benchmarks.table import publish
    from tests.zoo.constructed.summary import counts

    package = f"transformers {version('transformers')}"
    publish("zoo", rows, transformers=package, **counts(rows))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve()
    elif sys.argv[1:]:
        for row in list(examined(sys.argv[1:], ()))[1:]:
            print(json.dumps(row, indent=1))
    else:
        main()
