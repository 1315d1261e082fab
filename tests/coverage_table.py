"""Branch coverage of each package, as the table that CI publishes.

``python -m tests.coverage_table FILE`` reads what ``coverage json`` wrote. Nothing is
left out and there is no target: it is a map of what no test has entered. Code that
numba or triton compiles runs outside Python and counts as not covered.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def package(file: str) -> str:
    """Name a package of ours by the folder, or the one file, below its distribution."""
    parts = Path(file).with_suffix("").parts
    at = parts.index("src") + 1 if "src" in parts else 0
    return ".".join(parts[at : at + 2])


def by_package(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Add up the files of each package of ``coverage json``."""
    found: dict[str, Counter[str]] = {}
    for file, measured in sorted(files.items()):
        summary = {name: measured["summary"][name] for name in COUNTED}
        found.setdefault(package(file), Counter()).update(summary)
    return found


def table(packages: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield the rows of a Markdown table, the sum last."""
    yield "| package | statements | covered | branches | covered |"
    yield "|---|--:|--:|--:|--:|"
    total = sum(packages.values(), Counter[str]())
    for name, at in [*packages.items(), ("all", total)]:
        lines, branches = at["num_statements"], at["num_branches"]
        yield (
            f"| {name} | {lines} | {percent(at['covered_lines'], lines)} "
            f"| {branches} | {percent(at['covered_branches'], branches)} |"
        )


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(table(by_package(report["files"]))))
