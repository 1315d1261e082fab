"""First screens of sick and healthy runs, for a reader who knows neither names nor key.

``python -m lab.benchmarks.first_screens STORMS OUT``: STORMS is a folder of recorded
storms (``equipoise lab run storms``). Ten runs that failed, of as many families as
there are, and three that are healthy are drawn as the report's first screen alone (1440
× 900), shuffled, as ``screen-01.png`` …; ``key.json`` has the answers. Give the reader
the pictures only, and ask of each: sick or not, which layer, since when, what caused
it.
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.report.html import write_report
from equipoise.store import Run, open_run
from equipoise_lab.storms.labels import Label, labels

SICK, HEALTHY = 10, 3
WIDTH, HEIGHT = 1440, 900


def _readable(root: Path) -> list[Label]:
    """Return the labels of runs whose file is there: storms may be under way."""
    return [one for one in labels(root) if (one.folder / "run.eqp").is_file()]


def chosen(found: Sequence[Label], *, seed: int = 0) -> list[Label]:
    """Return ten failed runs, of every family in turn, and three controls."""
    rng = random.Random(seed)
    order = list(found)
    rng.shuffle(order)
    families: dict[str, list[Label]] = {}
    for label in order:
        if label.outcome == "failed" and label.storm.role == "fault":
            families.setdefault(label.storm.family, []).append(label)
    sick: list[Label] = []
    while len(sick) < SICK and any(families.values()):
        sick += [own.pop() for own in families.values() if own]
    fine = [label for label in order if label.storm.role == "control"]
    kinds = {label.storm.family: label for label in fine}
    picked = [*sick[:SICK], *list(kinds.values())[:HEALTHY]]
    rng.shuffle(picked)
    return picked


def drawn(pages: Sequence[Path]) -> None:
    """Write the first screen of each page beside it."""
    from playwright.sync_api import sync_playwright

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
        )
        for page in pages:
            view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            view.goto(page.as_uri())
            view.wait_for_selector("html[data-drawn=true]")
            view.wait_for_timeout(600)
            view.screenshot(path=page.with_suffix(".png"))
            view.close()
        browser.close()


def answer(label: Label, run: Run) -> dict[str, Any]:
    """Return what is true of a run, and what the page says."""
    verdict = run.verdict
    return {
        "sick": label.storm.role == "fault",
        "family": label.storm.family,
        "severity": label.storm.severity,
        "seed": label.storm.seed,
        "injected": label.injected,
        "onset of the loss": label.onset,
        "validation": label.validation,
        "healthy validation": label.healthy,
        "the page says": {
            "state": verdict.state,
            "sentence": verdict.sentence,
            "since": verdict.since,
        },
    }


def anonymous(run: Run) -> Run:
    """Return the run without what its name or file gives away."""
    run.info = replace(run.info, name="run", created="")
    return run


def main() -> None:
    """Draw the screens and write the key."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m lab.benchmarks.first_screens STORMS OUT")
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    key: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pages = []
        for n, label in enumerate(chosen(_readable(root)), 1):
            name = f"screen-{n:02}"
            run = anonymous(open_run(label.folder / "run.eqp"))
            key[name] = answer(label, run)
            pages.append(write_report({f"run {n}": run}, Path(folder) / f"{name}.html"))
        drawn(pages)
        for page in pages:
            shutil.copy(page.with_suffix(".png"), out)
    (out / "key.json").write_text(json.dumps(key, indent=1) + "\n")
    print(f"{len(key)} screens in {out}; the key is key.json: do not show it")


if __name__ == "__main__":
    main()
