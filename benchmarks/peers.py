"""Run every side-by-side benchmark again and rewrite what README and docs quote of it.

``./dev bench peers`` or ``python -m benchmarks.peers [STORMS] [NAME …]`` (STORMS: a
folder with recorded runs of ``lab run storms``; without it the forecast's row stays as
it is). Takes about an hour of CPU. Each benchmark is a process of its own: with names
only those are run, so that the table can be made in parts.
"""

import subprocess
import sys
from pathlib import Path

from docs import figures, peers

RUNS = (
    ("balance_speed",),
    ("overhead", "small"),
    ("watch_compile",),
    ("fsdp2_truth",),
    ("lipschitz",),
    ("fragility_models",),
    ("curvature_speed",),
)


def chosen(*given: str) -> list[tuple[str, ...]]:
    """Return what to run: all, or the benchmarks named; a folder brings the forecast.

    >>> chosen("lipschitz")
    [('lipschitz',)]
    >>> chosen("lipshitz")
    Traceback (most recent call last):
    SystemExit: lipshitz is neither a folder of storms nor one of balance_speed, ...
    """
    known = {run[0]: run for run in RUNS}
    storms = [one for one in given if one not in known]
    for one in storms:
        if not Path(one).is_dir():
            names = ", ".join(known)
            raise SystemExit(f"{one} is neither a folder of storms nor one of {names}")
    runs = [known[one] for one in given if one in known] or list(RUNS)
    return [*runs, *(("forecast", folder) for folder in storms)]


def main(*given: str) -> None:
    for name, *options in chosen(*given):
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *options], check=True
        )
    write()


def write() -> None:
    """Write the page and the quoted figures from the results as they are."""
    page = figures.HERE / "peers.md"
    page.write_text(peers.page(), encoding="utf-8")
    figures.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
