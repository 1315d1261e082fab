"""The pictures of README and docs: ``python -m benchmarks.screenshots [RUNS]``.

RUNS is a folder with run files, or with folders of them; without one, two made-up runs
are shown. Writes ``docs/images/report.png``, ``report-dark.png``, ``compare.png`` and
``board.png``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.board import launched, served
from equipoise.errors import InputError
from equipoise.report.html import write_report
from equipoise.report.report_model import labelled
from equipoise.store import Run, open_run
from equipoise.store.location import run_files
from tests.report.runs import pre_and_post

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LARGEST = 300_000


def pictured(page: Any, address: str, name: str) -> None:
    """Write one picture of the first screen."""
    page.goto(address)
    page.wait_for_selector("html[data-drawn=true]")
    page.wait_for_timeout(4000)
    page.screenshot(path=IMAGES / name)
    size = (IMAGES / name).stat().st_size
    print(f"{name}: {size} bytes" + (" (too large)" if size > LARGEST else ""))


def main() -> None:
    """Draw all of them."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(name)
        made = len(sys.argv) < 2
        runs: dict[str, Run] = (
            pre_and_post(folder, steps=200)
            if made
            else labelled([open_run(p) for p in run_files(folder, recursive=True)])
        )
        if not runs:
            raise InputError(f"{folder}: no run file in it")
        sick = {
            label: run for label, run in runs.items() if run.verdict.since is not None
        }
        first = dict(list((sick or runs).items())[:1])
        one = write_report(first, Path(name) / "report.html")
        two = write_report(runs, Path(name) / "compare.html")
        browser = launched(play)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        pictured(page, one.as_uri(), "report.png")
        pictured(page, f"{one.as_uri()}#theme=dark", "report-dark.png")
        pictured(page, two.as_uri(), "compare.png")
        with served(folder) as (address, *_):
            pictured(page, address, "board.png")
        browser.close()


if __name__ == "__main__":
    main()
