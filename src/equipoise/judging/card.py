"""The card of a run: what its loop was seen to do, section by section, as data.

A card is made of the facts that the readers of ``watching/facts`` state; it judges
nothing and makes no sentence (``text/card.py`` does). A reader names what it could not
see under ``unseen``: what → why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from equipoise.judging.facts import Facts, Section
from equipoise.records import Record

UNSEEN = "unseen"
"""The field of a section that names what was not seen: what → why."""
KEPT_FIRST = ("loss", "batch", "start")
"""Sections of which the first sampled step is kept beside the latest."""
MOST_RANKS = 64
MOST_ITEMS = 64
Lines = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Record):
    """What a training loop was seen to do."""

    step: int = -1
    """The sampled step of the latest facts."""
    samples: int = 0
    """Sampled steps it stands on."""
    sections: Mapping[str, Section] = field(default_factory=dict)
    """Section → its facts, as the first rank saw them last."""
    first: Mapping[str, Section] = field(default_factory=dict)
    """Facts of the first sampled step, of sections where the first value matters."""
    ranks: int = 1
    differing: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """``section.field`` → the values of the ranks, where they differ."""
    text: Mapping[str, Lines] = field(default_factory=dict)
    """Section → its lines, in the words of this version."""
    opening: Lines = ()
    """The card in three lines."""

    def __bool__(self) -> bool:
        return bool(self.sections)

    def __str__(self) -> str:
        return "\n".join(
            f"{title}\n" + "\n".join(f"  {line}" for line in lines)
            for title, lines in self.text.items()
        )

    def after(self, facts: Facts) -> "Card":
        """Return the card with what another sampled step showed."""
        known = {name: _brief(facts.section(name)) for name in facts.ranks[0]}
        sections = {n: {**self.sections.get(n, {}), **s} for n, s in known.items()}
        first = {
            n: known[n] for n in KEPT_FIRST if known.get(n) and n not in self.first
        }
        return replace(
            self,
            step=facts.step,
            samples=self.samples + 1,
            sections={**self.sections, **sections},
            first={**self.first, **first},
            ranks=len(facts.ranks),
            differing={**self.differing, **dict(_differing(facts))},
        )

    @property
    def unseen(self) -> dict[str, str]:
        """What was not seen of the loop: ``section.what`` → why."""
        return {
            f"{name}.{what}": str(why)
            for name, section in self.sections.items()
            for what, why in _reasons(section)
        }


def _brief(value: Any) -> Any:
    """Return facts without their long lists, which only checks need."""
    if isinstance(value, Mapping):
        return {k: _brief(own) for k, own in value.items() if not _is_long(own)}
    if isinstance(value, list | tuple):
        return [_brief(own) for own in value]
    return value


def _is_long(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > MOST_ITEMS


def _reasons(section: Section) -> Iterator[tuple[str, Any]]:
    given = section.get(UNSEEN)
    if isinstance(given, Mapping):
        yield from given.items()


def _differing(facts: Facts) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields in which ranks differ, with the value of each."""
    for name in facts.ranks[0] if len(facts.ranks) > 1 else ():
        own = facts.each(name)[:MOST_RANKS]
        for key, value in own[0].items():
            if isinstance(value, Mapping | list | tuple):
                continue
            values = [section.get(key) for section in own]
            if any(other != value for other in values):
                yield f"{name}.{key}", values
