"""Figures that README and docs quote from a benchmark, filled in from its JSON.

A quoted figure stands between two comments that no reader sees::

    +<!-- fig overhead_small/rows/1/mean % as .1f -->2.9<!-- /fig --> %

The path is the file in ``benchmarks/results/``, then keys and indices; behind ``as``
stands a format. ``./dev docs`` and ``./dev bench peers`` write the numbers again; a
path that is not in the JSON, or a number that differs from it, fails the tests.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
FIGURE = re.compile(r"<!-- fig ([^>]+?) as (\S+) -->.*?<!-- /fig -->", re.DOTALL)


def quoting() -> list[Path]:
    """Return the hand-written pages that quote a figure."""
    pages = [HERE.parent / "README.md", *sorted(HERE.rglob("*.md"))]
    return [page for page in pages if "<!-- fig " in page.read_text(encoding="utf-8")]


def filled(text: str) -> str:
    """Return a page with every quoted figure as the JSON has it now."""

    def number(found: re.Match[str]) -> str:
        path, form = found[1], found[2]
        return f"<!-- fig {path} as {form} -->{format(value(path), form)}<!-- /fig -->"

    return FIGURE.sub(number, text)


def value(path: str) -> Any:
    """Return a number of a benchmark's result by its path.

    Raises:
        LookupError: If the result or the number does not exist; it names the path.
    """
    name, *keys = path.split("/")
    found = _result(name)
    for key in keys:
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError) as error:
            raise LookupError(f"no {key!r} on the way to {path!r}") from error
    return found


@cache
def _result(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise LookupError(f"no result {name!r}: ./dev bench {name} writes it")
    return json.loads(path.read_text(encoding="utf-8"))


def write() -> None:
    """Fill in every page that quotes a figure."""
    _result.cache_clear()
    for page in quoting():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(HERE.parent))


if __name__ == "__main__":
    write()
