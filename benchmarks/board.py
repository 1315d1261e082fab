"""The board on a large run: paint, interaction, live update, memory, clients, soak.

``python -m benchmarks.board FILE [SAMPLED] [CYCLES]`` writes a run of 100,000 steps,
SAMPLED of them (10,000 unless given) with 96 layers × 32 heads × 20 quantities, a
gradient norm per layer, and the loss at every tenth, to FILE unless it is there (2.7
GB: all 20 are per head, as 8 of a real run are), and measures a board of its directory
in a real Chromium, then CYCLES looks at a live run (5,760 unless given: one every 5 s
for 8 hours). Times are of the wall clock: the machine's load is printed beside them.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.table import publish
from equipoise.records import Finding, Reading, RunInfo
from equipoise.store import RunWriter, open_run

STEPS, SAMPLED, LAYERS, HEADS, QUANTITIES = 100_000, 10_000, 96, 32, 20
BLOCKS = [f"blocks.{layer}" for layer in range(LAYERS)]
SITES = tuple(f"{block}.attention" for block in BLOCKS)
NAMES = (
    *(f"attention.theta.{q}" for q in ("p0", "p5", "p50", "p100", "mean")),
    "attention.entropy",
    "attention.max_logit",
    "attention.sink",
    "precision.kappa_softmax",
    *(f"made.q{k}" for k in range(QUANTITIES - 9)),
)
CLIENTS, CYCLES, LOOKS = 50, 5760, 120
"""A cycle every 5 s is 8 hours; a look opens a quantity, zooms in and out."""
POOL = 16


def write_run(path: Path, *, sampled: int = SAMPLED, steps: int = STEPS) -> None:
    """Write a run whose layers saturate from the 40th on, at 60 % of the steps."""
    rng = np.random.default_rng(0)
    details = {"model": "made", "blocks": BLOCKS, "attention": list(SITES)}
    info = RunInfo(name="large", created="2026-11-17", version="0", details=details)
    pool = (0.3 + 0.4 * rng.random((POOL, LAYERS, HEADS))).astype(np.float32)
    sick = pool.copy()
    sick[:, 40:] *= 1e-3
    calm, ill = _templates(pool), _templates(sick)
    every = max(1, steps // sampled)
    with RunWriter(path, info) as writer:
        for start in range(0, steps, 20 * every):
            readings = []
            for step in range(start, min(steps, start + 20 * every)):
                loss = 2 + 6 * np.exp(-step / 9000) + 0.05 * rng.standard_normal()
                if step % 10 == 0:
                    readings.append(Reading.scalar(step, "loss", loss))
                if step % every == 0:
                    values = ill if step > 0.6 * steps else calm
                    readings += _at(step, values[step // every % POOL])
            writer.append(readings)
        writer.append([], findings=[_finding(int(0.6 * steps))])


def _templates(pool: NDArray[np.float32]) -> list[list[Reading]]:
    """Return the readings of as many sampled steps as the pool has, without a step."""
    rows = [tuple(map(tuple, x.astype(float).tolist())) for x in pool]
    layers = tuple((float(v),) for v in np.linspace(0.5, 1.5, LAYERS))
    norms = {"sites": tuple(BLOCKS), "values": layers}
    return [
        [
            *(
                Reading(step=0, quantity=name, sites=SITES, values=rows[(n + k) % POOL])
                for k, name in enumerate(NAMES)
            ),
            Reading(step=0, quantity="gradient.norm", **norms),
        ]
        for n in range(POOL)
    ]


def _at(step: int, templates: list[Reading]) -> list[Reading]:
    """Return the readings at a step; values that were checked are not checked again."""
    found = [copy(one) for one in templates]
    for one in found:
        object.__setattr__(one, "step", step)
    return found


def _finding(step: int) -> Finding:
    return Finding(
        step=step,
        severity="error",
        code="attention.saturated",
        site="blocks.40.attention",
        message="attention is saturated from blocks.40 on",
        params={"since": step},
    )


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the address of a board, its process, and the seconds it took to answer."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "equipoise", "board", str(folder)]
    process = subprocess.Popen(
        [*command, "--no-browser", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        wait_for(lambda: httpx.get(found[0]).status_code == 200)
        yield found[0], process.pid, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(20)


def wait_for(ready: Callable[[], Any], *, seconds: float = 120.0) -> float:
    """Return how long it took until it was true."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        try:
            if ready():
                return time.perf_counter() - start
        except httpx.HTTPError:
            pass
        time.sleep(0.01)
    raise TimeoutError("never ready")


def megabytes(process: int, field: str = "VmHWM") -> float:
    """Return the largest (VmHWM) or the present (VmRSS) memory of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def launched(play: Any) -> Any:
    """Return a Chromium of this machine, without a window."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    return play.chromium.launch(
        executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
    )


def in_browser(address: str, path: Path) -> dict[str, float]:
    """Return seconds to the first paint and chart, of a zoom, and of live news."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = launched(play)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}run/{path.stem}")
        drawn = "document.querySelector('.surface canvas')?.width > 0"
        chart = wait_for(lambda: page.evaluate(drawn))
        paint = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        verdict = wait_for(lambda: page.locator(".verdict .pill").count())
        page.wait_for_timeout(1500)
        found = {
            "verdict, s": chart + verdict,
            "first paint, s": paint / 1000,
            "first chart, s": chart,
            "zoom, s": page.evaluate(ZOOM) / 1000,
            "crosshair, s": page.evaluate(CROSSHAIR) / 1000,
            "live update, s": _live(page, path),
        }
        browser.close()
    return found


ZOOM = """async () => {
  const times = [];
  for (let k = 0; k < 8; k++) {
    const start = performance.now();
    EQ.state.zoom([10000 + 4000 * k, 60000 + 2000 * k]);
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - start);
    await new Promise((done) => setTimeout(done, 400));
  }
  EQ.state.whole();
  return times.sort((a, b) => a - b)[4];
}"""
"""Median milliseconds from a zoom to the frame that shows it, over all charts."""

CROSSHAIR = """async () => {
  const times = [];
  for (let k = 0; k < 20; k++) {
    const start = performance.now();
    EQ.state.point(1000 * k);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[10];
}"""


def _live(page: Any, path: Path) -> float:
    """Return the median seconds from an append to the step being on the page."""
    times = []
    with RunWriter.resume(path) as writer:
        last = int(open_run(path).steps[-1])
        for k in range(1, 6):
            writer.append([Reading.scalar(last + k, "loss", 2.0)])
            shown = f"document.body.innerText.includes('step {last + k}')"
            times.append(wait_for(lambda text=shown: page.evaluate(text)))
    return sorted(times)[2]


def many_clients(address: str, key: str) -> dict[str, float]:
    """Return how long fifty clients wait for a grid while all follow the run."""
    times: list[float] = []
    done = threading.Event()

    def follow() -> None:
        with httpx.Client(timeout=120) as client:
            changed = f"{address}api/changed?run={key}"
            client.get(changed).raise_for_status()
            start = time.perf_counter()
            asked = {"quantity": "attention.theta.p5"}
            client.get(f"{address}api/grid/{key}", params=asked).raise_for_status()
            times.append(time.perf_counter() - start)
            while not done.wait(1):  # as a page asks
                client.get(changed).raise_for_status()

    threads = [threading.Thread(target=follow) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(times) == CLIENTS)
    done.set()
    for thread in threads:
        thread.join()
    return {"clients": CLIENTS, "slowest grid of all clients, s": max(times)}


def soak(
    address: str, path: Path, process: int, *, cycles: int = CYCLES
) -> dict[str, float]:
    """Return what grew over as many looks at a live run as a browser has in 8 hours."""
    start, seen = megabytes(process, "VmRSS"), []
    with RunWriter.resume(path) as writer, httpx.Client(timeout=60) as client:
        last = int(open_run(path).steps[-1])
        cursor = client.get(f"{address}api/run/{path.stem}").json()["cursor"]
        for k in range(1, cycles + 1):
            writer.append([Reading.scalar(last + k, "loss", 2.0)])
            asked = {"cursor": cursor, "quantity": ["loss"]}
            news = client.get(f"{address}api/since/{path.stem}", params=asked).json()
            cursor = news["cursor"]
            client.get(f"{address}api/grid/{path.stem}", params={"quantity": "loss"})
            if k in {cycles // 4, cycles}:
                seen.append((megabytes(process, "VmRSS"), *_handles(process)))
    growth = [after - before for before, after in zip(*seen, strict=True)]
    names = ("growth in MB", "more descriptors", "more threads")
    found = {f"soak, {name}": value for name, value in zip(names, growth, strict=True)}
    ends = {"soak, MB at the start": start, "soak, MB at the end": seen[1][0]}
    return {"soak, cycles": cycles, **ends, **found, "soak, load": os.getloadavg()[0]}


def _handles(process: int) -> tuple[int, int]:
    """Return how many descriptors and threads a process has."""
    folder = Path(f"/proc/{process}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))


def page_soak(address: str, path: Path) -> dict[str, float]:
    """Return what grew in the page over many updates, zooms and openings."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play, RunWriter.resume(path) as writer:
        browser = launched(play)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{address}run/{path.stem}")
        wait_for(lambda: page.locator(".verdict .pill").count())
        session = page.context.new_cdp_session(page)
        last, seen = int(open_run(path).steps[-1]), []
        for k in range(1, LOOKS + 1):
            writer.append([Reading.scalar(last + k, "loss", 2.0)])
            page.evaluate(LOOK, NAMES[k % 4])
            if k in {LOOKS // 4, LOOKS}:
                page.wait_for_timeout(5000)  # until what was asked for has come
                seen.append(_page_counts(session))
        browser.close()
    growth = {name: seen[1][name] - seen[0][name] for name in seen[0]}
    return {"page, looks": LOOKS, **growth}


LOOK = """async (name) => {
  EQ.open(name, null, null);
  EQ.state.zoom([20000, 50000]);
  await new Promise((done) => setTimeout(done, 150));
  EQ.state.whole();
}"""


def _page_counts(session: Any) -> dict[str, float]:
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = session.send("Performance.getMetrics")["metrics"]
    counts = {one["name"]: one["value"] for one in found}
    return {
        "page, more listeners": counts["JSEventListeners"],
        "page, more nodes": counts["Nodes"],
        "page, more MB of heap": counts["JSHeapUsedSize"] / 2**20,
    }


def main() -> None:
    """Write the run unless it is there, serve it, and measure."""
    path = Path(sys.argv[1])
    sampled = int(sys.argv[2]) if len(sys.argv) > 2 else SAMPLED
    cycles = int(sys.argv[3]) if len(sys.argv) > 3 else CYCLES
    if not path.exists():
        write_run(path, sampled=sampled)
    row: dict[str, Any] = {
        "sampled steps": sampled,
        "values": sampled * LAYERS * HEADS * QUANTITIES,
        "file, MB": path.stat().st_size / 2**20,
    }
    with served(path.parent) as (address, process, ready):
        row["start, s"] = ready
        row |= in_browser(address, path)
        row |= many_clients(address, path.stem)
        row |= soak(address, path, process, cycles=cycles)
        row |= page_soak(address, path)
        row["server memory, MB"] = megabytes(process)
    row["load"] = os.getloadavg()[0]
    rows = [{"what": name, "value": value} for name, value in row.items()]
    publish("board", rows, steps=STEPS, layers=LAYERS, heads=HEADS, names=len(NAMES))


if __name__ == "__main__":
    main()
