"""Remedies by name: when each fits, the three lines that apply it, what it rescued.

The code that changes a model is in ``equipoise.remedies``; advice needs only this,
``remedies.toml`` and ``rescues.json`` beside it (made by ``python -m docs.remedies``
from ``benchmarks.remedies``). Torch-free.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

HALVED = "half the rate at the start"
BACK = "roll_back + "
"""Before a remedy that is applied to weights from before the trouble."""


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
    back: tuple[tuple[str, str], ...] = ()
    """Family of trouble → options after a roll-back; "" for any other family."""

    @property
    def page(self) -> str:
        return f"docs/remedies/{self.name.replace('_', '-')}.md"

    def against(self, family: str) -> "RemedyEntry":
        """Return it as it did best against a family: as it is, or after a roll-back."""
        options = dict(self.back).get(family, dict(self.back).get("", ""))
        alone, after = (rescues().get(n, {}).get(family) for n in self._both)
        if after is None or (alone is not None and alone.better >= after.better):
            return self
        code = (
            "from equipoise.remedies.catalogue import remedy\n"
            'remedy("roll_back", checkpoint="last.pt").apply(model, optimizer)\n'
            f'undo = remedy("{self.name}"{options}).apply(model, optimizer)'
        )
        does = "go back to a checkpoint from before the trouble, then "
        does += f"{self.name}({options.removeprefix(', ')})"
        return replace(self, does=does, code=code)

    def best(self, family: str) -> "Cell | None":
        """Return the better of its two results against a family, if it was tried."""
        found = [rescues().get(name, {}).get(family) for name in self._both]
        tried = [cell for cell in found if cell is not None]
        return max(tried, key=lambda cell: cell.better, default=None)

    @property
    def _both(self) -> tuple[str, str]:
        return self.name, BACK + self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a remedy did to failing runs of one family."""

    rescued: int
    tried: int
    closed: float
    """Mean share of the gap to the healthy run; below 0 it did harm."""

    @property
    def better(self) -> tuple[float, float]:
        """What two remedies are compared by."""
        return self.rescued / self.tried, self.closed

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
            "from equipoise.remedies.catalogue import remedy\n"
            f'undo = remedy("{name}"{options}).apply(model, optimizer)\n'
            f"# {given.get('then', 'undo() takes it back')}"
        )
        back = {
            f: f", {text}" if text else "" for f, text in given.get("back", {}).items()
        }
        yield RemedyEntry(
            name=name,
            does=given["does"],
            fits=given["fits"],
            code=code,
            back=tuple(back.items()),
        )


CATALOGUE = {entry.name: entry for entry in _catalogue()}
"""Name → entry, the most general first."""


def advise(names: Iterable[str]) -> str:
    """Return the remedies as one line of advice, the first to try in front.

    >>> advise(["learning_rate", "beta2"])
    'halve the learning rate and warm up again; or set β₂ to 0.95 or higher'
    """
    return "; or ".join(CATALOGUE[name].does for name in names)
