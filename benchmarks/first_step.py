"""CPU seconds of compiling on a fresh installation: `equipoise warmup` anew."""

import os
import re
import statistics
import subprocess
import sys
import tempfile

from benchmarks.table import publish

REPEATS = 3


def measured() -> float:
    """Return the CPU seconds that ``equipoise warmup`` reports with an empty cache."""
    with tempfile.TemporaryDirectory() as empty:
        variables = {**os.environ, "XDG_CACHE_HOME": empty, "OMP_NUM_THREADS": "1"}
        variables.pop("NUMBA_CACHE_DIR", None)
        shown = subprocess.run(
            [sys.executable, "-m", "equipoise", "warmup"],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"compiled in ([\d.]+) CPU s", shown)
    if found is None:
        raise RuntimeError(f"no time in {shown!r}")
    return float(found.group(1))


def main() -> None:
    seconds = [measured() for _ in range(REPEATS)]
    row = {"median CPU s": statistics.median(seconds), "worst CPU s": max(seconds)}
    publish("first_step", [row], bar="8 CPU seconds on a quiet machine")


if __name__ == "__main__":
    main()
