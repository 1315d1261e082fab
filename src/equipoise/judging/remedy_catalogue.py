"""Remedies by name: when each fits, the three lines that apply it, what it rescued.

The code that changes a model is in ``equipoise.remedies``; advice needs only this,
``remedies.toml`` and ``rescues.json`` beside it (made by ``python -m docs.remedies``
from ``benchmarks.remedies``). Torch-free.
"""

import ast
import json
import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

GO_BACK = "go back to a checkpoint from before the trouble, then"
HALVED = "half the rate at the start"
BACK = "roll_back + "
"""Before a remedy that is applied to weights from before the trouble."""


IMPORT = "from equipoise.remedies.catalogue import remedy"


def parsed(label: str) -> tuple[str, dict[str, Any]]:
    """Return the remedy and the options of a row of the table.

    >>> parsed("roll_back + beta2(beta2=0.95, epsilon=1e-8)")
    ('beta2', {'beta2': 0.95, 'epsilon': 1e-08})
    """
    name, options = _name_and_options(label)
    call = ast.parse(f"f({options})", mode="eval").body
    assert isinstance(call, ast.Call)
    return name, {str(w.arg): ast.literal_eval(w.value) for w in call.keywords}


def _name_and_options(label: str) -> tuple[str, str]:
    if label == HALVED:
        return "learning_rate", "scale=0.5, warmup=0"
    name, _, options = label.removeprefix(BACK).partition("(")
    return name, options.removesuffix(")")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyEntry:
    """A remedy as advice: what to do, when it fits, how to type it."""

    name: str
    does: str
    """What to do, as an imperative."""
    fits: str
    """The troubles it is meant for."""
    code: str
    """Lines for the user's own training loop."""
    then: str = ""
    """What to do after it was applied to earlier weights, if anything."""

    @property
    def page(self) -> str:
        return f"docs/remedies/{self.name.replace('_', '-')}.md"

    def against(self, family: str) -> "RemedyEntry":
        """Return it in the form that did best against a family, with its options."""
        cells = self._tried(family)
        if not cells:
            return self
        label = max(cells, key=lambda one: cells[one].better)
        _, options = _name_and_options(label)
        call = f'remedy("{self.name}"{", " if options else ""}{options})'
        apply = f"undo = {call}.apply(model, optimizer)"
        if label == HALVED:
            lines = IMPORT, apply, "# in a new run, before its first step"
            does = "start again at half the learning rate"
            return replace(self, does=does, code="\n".join(lines))
        if not label.startswith(BACK):
            return self
        back = 'remedy("roll_back", checkpoint="last.pt").apply(model, optimizer)'
        then = f"  # {self.then}" if self.then else ""
        does = f"{GO_BACK} {self.name}"
        does += f"({options})" if options else ""
        return replace(self, does=does, code="\n".join((IMPORT, back, apply + then)))

    def best(self, family: str) -> "Cell | None":
        """Return the best of its results against a family, if it was tried."""
        cells = self._tried(family).values()
        return max(cells, key=lambda cell: cell.better, default=None)

    def _tried(self, family: str) -> dict[str, "Cell"]:
        return {
            label: families[family]
            for label, families in rescues().items()
            if family in families and _name_and_options(label)[0] == self.name
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a remedy did to failing runs of one family."""

    rescued: int
    tried: int
    closed: float
    """Mean share of the gap to the healthy run; below 0 it did harm."""

    @property
    def better(self) -> tuple[float, float]:
        """What two remedies are compared by: what they surely rescue, then the gap."""
        return self.interval[0], self.closed

    @property
    def harms(self) -> bool:
        return not self.rescued and self.closed < 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share rescued, by Wilson.

        >>> [round(end, 2) for end in Cell(rescued=5, tried=5, closed=1.0).interval]
        [0.57, 1.0]
        """
        n, share, z = self.tried, self.rescued / self.tried, 1.96
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        spread = math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        wide = z * spread / (1 + z * z / n)
        return max(0.0, middle - wide), min(1.0, middle + wide)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rescued} of {self.tried} ({100 * low:.0f}–{100 * high:.0f} %)"


@cache
def rescues() -> dict[str, dict[str, Cell]]:
    """Return remedy → family → what was measured; what is absent was not tried."""
    text = Path(__file__).with_name("rescues.json").read_text(encoding="utf-8")
    return {
        name: {family: Cell(**cell) for family, cell in families.items()}
        for name, families in json.loads(text).items()
    }


def _catalogue() -> Iterator[RemedyEntry]:
    table = Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8")
    for name, given in tomllib.loads(table).items():
        options = f", {given['options']}" if "options" in given else ""
        code = (
            f"{IMPORT}\n"
            f'undo = remedy("{name}"{options}).apply(model, optimizer)\n'
            f"# {given.get('then', 'undo() takes it back')}"
        )
        yield RemedyEntry(
            name=name,
            does=given["does"],
            fits=given["fits"],
            code=code,
            then=given.get("then_back", ""),
        )


CATALOGUE = {entry.name: entry for entry in _catalogue()}
"""Name → entry, the most general first."""


def offered(names: Iterable[str], family: str) -> list[RemedyEntry]:
    """Return remedies in the order to try them against a family of trouble.

    By what they rescued on the benchmark, each in the form that did best there. What
    was not tried follows, what rescued no run and did harm is left out. Half the rate
    from the start comes in front of a first one that is not better than it.
    """
    half, entries = rescues().get(HALVED, {}).get(family), _by_name(names)
    if half is None:
        return [entry.against(family) for entry in entries]
    tried = {entry.name: cell for entry in entries if (cell := entry.best(family))}
    good = [e for e in entries if e.name in tried and not tried[e.name].harms]
    good.sort(key=lambda entry: tried[entry.name].better, reverse=True)
    rate = CATALOGUE["learning_rate"]
    if not good or tried[good[0].name].better <= half.better:
        good = [rate, *(entry for entry in good if entry is not rate)]
    order = [*good, *(entry for entry in entries if entry.name not in tried)]
    return [entry.against(family) for entry in dict.fromkeys(order)]


def _by_name(names: Iterable[str]) -> list[RemedyEntry]:
    return [CATALOGUE[name] for name in names]


def advise(names: Iterable[str], family: str = "") -> str:
    """Return the remedies as one line of advice, the first to try in front.

    >>> advise(["learning_rate", "beta2"])
    'halve the learning rate and warm up again; or set β₂ to 0.95 or higher'
    """
    return "; or ".join(entry.does for entry in offered(names, family))
