"""Damaged run files through report and board: no crash, no long wait, no script run.

``python -m benchmarks.mutated_pages [FILES] [SEED] [SEEN]``; 10,000 files unless given.
It can be run in parts: from seed 1 on, a part is added to those before it.

The mutations are those of ``mutated_runs``; names in the run are markup, so that a page
which forgot to escape one would carry a script of theirs. Each file is made into a
report and asked for through every address of the board, in this process; SEEN others
(200 unless given) are opened in Chromium, as a report and on a board. Outcomes:
*shown*, *refused* (our own error), *foreign* (an exception that is not ours), *slow*
(above 5 s of CPU), *script* (one of the file's was in a page, or ran).
"""

import asyncio
import json
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from benchmarks.board import launched, served
from benchmarks.mutated_runs import MUTATIONS, WEIGHTS
from benchmarks.table import RESULTS, publish
from equipoise.errors import EquipoiseError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.report.html import write_report
from equipoise.store import RunWriter, open_run
from equipoise.web.app import application
from equipoise.web.security import Access

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
SLOW_S = 5.0
STEPS = 24


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
                step=step, severity="warn", code=EVIL, message=EVIL, site=EVIL
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
        found = asyncio.run(_board(folder)) or found
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


async def _board(folder: Path) -> str:
    """Return what is wrong with the board's answers; nothing if all is well."""
    app = application(folder, Access())
    for address in addresses():
        status, kind = await _asked(app, address)
        if status not in {200, 404}:
            return f"foreign status {status}"
        if status == 200 and kind != "application/json":
            return "script"
    return ""


async def _asked(app: ASGIApp, address: str) -> tuple[int, str]:
    """Return status and content type of one address, without a server between."""
    path, _, query = address.partition("?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1")],
        "app": app,
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception:  # Starlette answers 500, then raises what it was
        return 500, ""
    headers = dict(sent[0]["headers"])
    return int(sent[0]["status"]), headers.get(b"content-type", b"").decode()


def mutated(folder: Path, count: int, *, seed: int) -> Iterator[Path]:
    """Write one mutated file after another over ``mutated.eqp``."""
    write_run(folder / "sound.eqp")
    original, path = (folder / "sound.eqp").read_bytes(), folder / "mutated.eqp"
    rng = random.Random(seed)
    for kind in rng.choices(list(MUTATIONS), WEIGHTS, k=count):
        data = bytearray(original)
        MUTATIONS[kind](data, rng)
        path.write_bytes(data)
        yield path


def campaign(folder: Path, count: int, *, seed: int = 0) -> Counter[str]:
    """Return how often each outcome came."""
    return Counter(outcome(folder) for _ in mutated(folder, count, seed=seed))


def in_browser(folder: Path, count: int, *, seed: int = 0) -> Counter[str]:
    """Return what Chromium did with reports and board pages of mutated files."""
    from playwright.sync_api import sync_playwright

    found: Counter[str] = Counter()
    with sync_playwright() as play, served(folder) as (address, *_):
        browser = launched(play)
        for path in mutated(folder, count, seed=seed):
            pages = [f"{address}run/mutated"]
            if _report(folder) != "refused":
                pages.append((folder / "page.html").as_uri())
            found.update(_looked_at(browser, page) for page in pages)
            path.unlink()
        browser.close()
    return found


def _looked_at(browser: Any, address: str) -> str:
    """Return whether a page was drawn, and whether anything of the file's ran in it."""
    context = browser.new_context()
    page, dialogs = context.new_page(), []
    page.on("dialog", lambda box: (dialogs.append(box.message), box.dismiss()))
    page.goto(address)
    start = time.perf_counter()
    try:
        page.wait_for_selector("html[data-drawn=true]", timeout=60_000)
    except Exception:
        return "page never drawn"
    slow = time.perf_counter() - start > 10 * SLOW_S  # of the wall, on a busy machine
    page.wait_for_timeout(50)
    markup = page.evaluate("document.querySelectorAll('img, main script').length")
    context.close()
    if dialogs or markup:
        return "script"
    return "slow page" if slow else "page drawn"


def main() -> None:
    """Run the campaign, or a part of it, and print the table so far."""
    count, seed, seen = (
        int(sys.argv[k]) if len(sys.argv) > k else otherwise
        for k, otherwise in ((1, 10_000), (2, 0), (3, 200))
    )
    logging.disable(logging.CRITICAL)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), count, seed=seed)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with tempfile.TemporaryDirectory() as folder:
        found += in_browser(Path(folder), seen, seed=10**6 + seed)
    _publish(found, seed, files=count, in_browser=seen, cpu_s=seconds, peak_mb=peak)


def _publish(found: Counter[str], seed: int, **counts: float) -> None:
    """Write the table; from seed 1 on, added to what the seeds before it found."""
    path = RESULTS / "mutated_pages.json"
    if seed and path.exists():
        before = json.loads(path.read_text())
        found += Counter({row["outcome"]: row["files"] for row in before["rows"]})
        peak = max(counts["peak_mb"], before["peak_mb"])
        counts = {k: v + before[k] for k, v in counts.items()} | {"peak_mb": peak}
    rows = [{"outcome": name, "files": number} for name, number in found.items()]
    publish("mutated_pages", rows, seeds=seed + 1, **counts)


if __name__ == "__main__":
    main()
