"""``./dev bench [NAME …]``: run the named benchmarks, or list them."""

import importlib
import sys
from pathlib import Path

import benchmarks

HOME = Path(benchmarks.__path__[0])


def names() -> list[str]:
    """Return what has a ``main``; the rest is what benchmarks share."""
    files = {file.stem: file for file in HOME.glob("[!_]*.py")}
    files |= {file.parent.name: file for file in HOME.glob("*/__init__.py")}
    return sorted(n for n, file in files.items() if "\ndef main(" in file.read_text())


def main(wanted: list[str]) -> int:
    unknown = set(wanted) - {"all", *names()}
    if unknown or not wanted:
        print("usage: ./dev bench all | NAME …\n  " + "\n  ".join(names()))
        return 2 if unknown else 0
    for name in names() if "all" in wanted else wanted:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
