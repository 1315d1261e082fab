"""Facts: what a training loop was seen to do in one sampled step, as plain data.

A fact is read off the loop exactly: which function made the loss, which weights have no
gradient, at which shift targets and inputs meet. It has no threshold and needs no other
run. Checks judge facts, the card shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Section = Mapping[str, Any]
"""Facts of one reader: JSON values by name. What is not known is absent, never 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of the loop in one sampled step, on every rank."""

    step: int
    ranks: tuple[Mapping[str, Section], ...]
    """One mapping for each rank: name of a section → its facts."""

    def section(self, name: str) -> Section:
        """Return a section as the first rank saw it; empty where it was not read."""
        return self.ranks[0].get(name, {})

    def each(self, name: str) -> tuple[Section, ...]:
        """Return a section as each rank saw it."""
        return tuple(sections.get(name, {}) for sections in self.ranks)
