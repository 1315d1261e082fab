"""Run every side-by-side benchmark again and rewrite what README and docs quote of it.

``./dev bench peers`` or ``python -m benchmarks.peers [STORMS]`` (STORMS: recorded runs
of ``lab run storms``; without them the forecast's row stays as it is). Takes about an
hour of CPU. Each benchmark is a process of its own and can also be run by name.
"""

import subprocess
import sys

from docs import figures, peers

RUNS = (
    ("balance_speed",),
    ("overhead", "small"),
    ("watch_compile",),
    ("lipschitz",),
    ("fragility_models",),
    ("curvature_speed",),
)


def main(storms: str | None = None) -> None:
    for name, *options in (*RUNS, *([("forecast", storms)] if storms else [])):
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
    main(*sys.argv[1:2])
