"""Figures that README and docs quote from a benchmark, filled in from its JSON.

A quoted figure stands between two comments that no reader sees::

    +<!-- fig overhead_small/rows/monitor=plain/mean % as .1f -->0.0<!-- /fig --> %

The path is the file in ``benchmarks/results/``, then keys and indices; in a list of
rows ``KEY=VALUE`` is the row that has it, so that a new row moves no figure. Behind
``as`` stands a format. ``./dev docs`` and ``./dev bench peers`` write the numbers
again; they fail at a path that is not in the JSON and at a figure beside the name of a
peer that stands in no such comment. A number that differs from the JSON fails the
tests.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
FIGURE = re.compile(r"<!-- fig ([^>]+?) as (\S+) -->.*?<!-- /fig -->", re.DOTALL)
PEERS = re.compile(
    r"wandb\.watch|TensorBoard hist|trainscope|torch-module-monitor|curvlinops|"
    r"eigenthings|PyHessian|sort-and-cumsum",
    re.IGNORECASE,
)
MEASURED = re.compile(r"\d[\d.,]* ?(?:%|×(?! ?\d)|times|CPU seconds|GiB|MiB)")
"""A number with a unit of measurement, beside the name of a peer."""
GENERATED = {"peers.md", "claims.md", "choosing-a-normaliser.md", "zoo-by-class.md"}
"""Pages that are made from JSON as a whole."""


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


def unsupported(text: str) -> list[str]:
    """Return lines that give a peer a figure which no JSON supports.

    >>> unsupported("trainscope costs 17 % more")
    ['trainscope costs 17 % more']
    """
    lines = FIGURE.sub("", text).splitlines()
    return [line for line in lines if PEERS.search(line) and MEASURED.search(line)]


def check() -> None:
    """Refuse figures beside a peer that are typed in.

    Raises:
        LookupError: With the page and the line of the first.
    """
    for page in (HERE.parent / "README.md", *sorted(HERE.rglob("*.md"))):
        if page.name not in GENERATED:
            for line in unsupported(page.read_text(encoding="utf-8")):
                raise LookupError(
                    f"{page.name} has a figure that no JSON supports; put it between "
                    f"<!-- fig PATH as FORMAT --> and <!-- /fig -->: {line.strip()}"
                )


def value(path: str) -> Any:
    """Return a number of a benchmark's result by its path.

    Raises:
        LookupError: If the result or the number does not exist; it names the path.
    """
    name, *keys = path.split("/")
    found = _result(name)
    for key in keys:
        try:
            found = _row(found, key) if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError) as error:
            raise LookupError(f"no {key!r} on the way to {path!r}") from error
    return found


def _row(rows: list[Any], key: str) -> Any:
    """Return the row of that index, or the one row that has KEY=VALUE."""
    field, equals, wanted = key.partition("=")
    if not equals:
        return rows[int(key)]
    (row,) = [row for row in rows if str(row.get(field)) == wanted]
    return row


@cache
def _result(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise LookupError(f"no result {name!r}: ./dev bench {name} writes it")
    return json.loads(path.read_text(encoding="utf-8"))


def write() -> None:
    """Fill in every page that quotes a figure; refuse figures that are typed in."""
    _result.cache_clear()
    check()
    for page in quoting():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(HERE.parent))


if __name__ == "__main__":
    write()
