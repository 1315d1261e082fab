"""``./dev bench [NAME …]``: run the named benchmarks, or list them.

Those of the laboratory are in ``lab/benchmarks``.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("benchmarks", "lab/benchmarks")


def modules() -> dict[str, str]:
    """Return name → module of what has a ``main``; the rest is what they share."""
    found = {}
    for place in PLACES:
        home = ROOT / place
        files = {file.stem: file for file in home.glob("[!_]*.py")}
        files |= {file.parent.name: file for file in home.glob("*/__init__.py")}
        for name, file in files.items():
            if "\ndef main(" in file.read_text():
                found[name] = f"{place.replace('/', '.')}.{name}"
    return dict(sorted(found.items()))


def main(wanted: list[str]) -> int:
    known = modules()
    unknown = set(wanted) - {"all", *known}
    if unknown or not wanted:
        print("usage: ./dev bench all | NAME …\n  " + "\n  ".join(known))
        return 2 if unknown else 0
    for name in known if "all" in wanted else wanted:
        importlib.import_module(known[name]).main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
