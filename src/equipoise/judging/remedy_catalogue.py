"""Remedies by name: when each fits, and the lines that apply it.

The code that changes a model is in ``equipoise.remedies``; advice needs only this and
``remedies.toml``. Torch-free.
"""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

IMPORT = "from equipoise.remedies.catalogue import remedy"


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

    @property
    def page(self) -> str:
        return f"docs/remedies/{self.name.replace('_', '-')}.md"


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
        )


CATALOGUE = {entry.name: entry for entry in _catalogue()}
"""Name → entry, the most general first."""


def advise(names: Iterable[str]) -> str:
    """Return the remedies as one line of advice, the first to try in front.

    >>> advise(["learning_rate", "beta2"])
    'halve the learning rate and warm up again; or set β₂ to 0.95 or higher'
    """
    return "; or ".join(CATALOGUE[name].does for name in names)
