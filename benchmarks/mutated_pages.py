"""Damaged run files through report and board: no crash, no long wait, no script run.

``python -m benchmarks.mutated_pages [FILES]``; 10,000 unless given. The mutations are
those of ``mutated_runs``; names in the run are markup, so that a page which forgot to
escape one would carry a script of theirs. Each file is made into a report and asked for
through every address of the board. Outcomes: *shown*, *refused* (our own error),
*foreign* (an exception that is not ours), *slow* (above 5 s of CPU), *script*.
"""

import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from starlette.testclient import TestClient

from benchmarks.mutated_runs import MUTATIONS, WEIGHTS
from benchmarks.table import publish
from equipoise.errors import EquipoiseError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.report.html import write_report
from equipoise.store import RunWriter, open_run
from equipoise.web.app import application
from equipoise.web.security import Access

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
SLOW_S = 5.0
STEPS = 48


def write_run(path: Path) -> None:
    """Write a short run whose every name is markup."""
    rng = random.Random(3)
    sites = (f"blocks.0.{EVIL}", "blocks.1.attention")
    info = RunInfo(
        name=EVIL, created="now", version="0", details={"blocks": ["blocks.0"], EVIL: 1}
    )
    with RunWriter(path, info) as writer:
        for step in range(STEPS):
            heads = tuple(tuple(rng.random() for _ in range(3)) for _ in sites)
            theta = Reading(
                step=step, quantity="attention.theta.p5", sites=sites, values=heads
            )
            found = Finding(
                step=step, severity="warn", rule=EVIL, message=EVIL, site=EVIL
            )
            writer.append(
                [
                    Reading.scalar(step, "loss", rng.random()),
                    Reading.scalar(step, EVIL, rng.random()),
                    theta,
                ],
                findings=[found] if step % 16 == 3 else [],
                applied=[Applied(step=step, remedy=EVIL)] if step == 20 else [],
            )


def addresses() -> Iterator[str]:
    """Yield every address of the board for the run ``mutated``."""
    yield "/api/runs"
    for part in ("run", "verdict", "changes", "since"):
        yield f"/api/{part}/mutated?quantity=loss&quantity=attention.theta.p5"
    for part in ("grid", "heads"):
        for name in ("loss", "attention.theta.p5", "not.there"):
            yield f"/api/{part}/mutated?quantity={name}&step=7&from=3&to=30"
    yield "/api/compare?run=mutated&run=sound"


def outcome(folder: Path) -> str:
    """Return what became of a report and of a board of one mutated file."""
    start = time.process_time()
    try:
        found = _report(folder)
        found = _board(folder) or found
    except Exception as error:
        return f"foreign {type(error).__name__}"
    return "slow" if time.process_time() - start > SLOW_S else found


def _report(folder: Path) -> str:
    try:
        runs = {"mutated": open_run(folder / "mutated.eqp")}
        page = write_report(runs, folder / "page.html").read_text(encoding="utf-8")
    except EquipoiseError:
        return "refused"
    return "script" if page.count("<script") != 2 or "<img" in page else "shown"


def _board(folder: Path) -> str:
    """Return what is wrong with the board's answers; nothing if all is well."""
    app = application(folder, Access())
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for address in addresses():
            answer = client.get(address)
            if answer.status_code not in {200, 404}:
                return f"foreign status {answer.status_code}"
            kind = answer.headers["content-type"]
            if answer.status_code == 200 and kind != "application/json":
                return "script"
    return ""


def campaign(folder: Path, count: int, *, seed: int = 0) -> Counter[str]:
    """Return how often each outcome came."""
    write_run(folder / "sound.eqp")
    original = (folder / "sound.eqp").read_bytes()
    rng, found = random.Random(seed), Counter[str]()
    for kind in rng.choices(list(MUTATIONS), WEIGHTS, k=count):
        data = bytearray(original)
        MUTATIONS[kind](data, rng)
        (folder / "mutated.eqp").write_bytes(data)
        found[outcome(folder)] += 1
    return found


def main() -> None:
    """Run the campaign, and print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [{"outcome": name, "files": number} for name, number in found.items()]
    seconds = time.process_time() - start
    publish("mutated_pages", rows, files=count, peak_mb=peak, cpu_seconds=seconds)


if __name__ == "__main__":
    main()
