"""Makes the lines of a card: facts through the templates of ``card.toml``.

A line is a list of templates over the facts of its section, the fullest first: the
first one whose facts are all there is the line. Where a fact is absent in all of them
the card has nothing to say.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from equipoise.judging.card import UNSEEN, Card
from equipoise.judging.facts import Section
from equipoise.judging.statements import stated
from equipoise.text.templates import filled

FILE = Path(__file__).with_name("card.toml")
OTHER = "other"
"""The case of a value that has no words of its own."""
MOST_EACH = 6
"""Lines for the items of one list: groups, layer types."""

Say = str | Sequence[str]
"""One template, or several: the fullest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTemplate:
    """What the card says of one fact, or of a few that belong together."""

    code: str
    """``section.name``."""
    say: Say | Mapping[str, Say] = ()
    """Templates; by the value of a field, where ``by`` names one."""
    short: Say | Mapping[str, Say] = ()
    """The same as a verb or a noun, for one line of several facts."""
    by: str = ""
    each: str = ""
    """A field that holds several items, each of which gets a line; or one mapping."""
    verb: bool = False
    """Whether ``short`` follows a run's name: "A shifts labels twice"."""
    varies: bool = False
    """Whether it changes from step to step: not compared between runs."""

    @property
    def section(self) -> str:
        return self.code.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardWords:
    """The whole of ``card.toml``."""

    titles: Mapping[str, str]
    opening: Mapping[str, Sequence[str]]
    """Line → the codes whose short forms it joins."""
    unseen: Mapping[str, str]
    reasons: Mapping[str, str]
    lines: Sequence[LineTemplate] = field(default=())


@cache
def card_words() -> CardWords:
    """Return the templates, in the order of the card."""
    given = tomllib.loads(FILE.read_text(encoding="utf-8"))
    lines = [LineTemplate(code=code, **own) for code, own in given["lines"].items()]
    return CardWords(**{**given, "lines": lines})


def worded(card: Card) -> Card:
    """Return a card with the lines of this version."""
    words = card_words()
    text = {title: tuple(lines) for title, lines in _titled(card) if lines}
    found = [_opening(card, name, codes) for name, codes in words.opening.items()]
    return replace(card, text=text, opening=tuple(filter(None, found)))


def _titled(card: Card) -> Iterator[tuple[str, list[str]]]:
    for name, title in card_words().titles.items():
        section = card.sections.get(name)
        if isinstance(section, Mapping):
            lines = [line for _, line in section_lines(name, card)]
            yield title, [*lines, *_unseen_lines(section), *_ranks(name, card)]


def section_lines(name: str, card: Card) -> Iterator[tuple[LineTemplate, str]]:
    """Yield the lines of one section, with the template of each."""
    for one in card_words().lines:
        if one.section == name:
            facts = _facts(card, name)
            yield from ((one, line) for line in _said(one, one.say, facts))


def _facts(card: Card, name: str) -> Mapping[str, Any]:
    """Return the words of a section: its facts, and those of its first step."""
    first = stated(name, {**card.sections, **card.first})
    early = {f"first_{key}": value for key, value in first.items()}
    return {**early, **stated(name, card.sections)}


def _said(
    one: LineTemplate, say: Say | Mapping[str, Say], facts: Mapping[str, Any]
) -> Iterator[str]:
    for words in _items(one, facts):
        chosen = say
        if isinstance(chosen, Mapping):
            if one.by not in words:
                continue
            case = str(words[one.by]).lower()
            chosen = chosen.get(case, chosen.get(OTHER, ()))
        line = _first_filled(chosen, words)
        if line:
            yield line


def _items(one: LineTemplate, facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if not one.each:
        return [facts]
    given = facts.get(one.each, ())
    if isinstance(given, Mapping) and not _holds_mappings(given):
        return [{**facts, **given}]
    if isinstance(given, Mapping):
        given = [{"name": name, **own} for name, own in given.items()]
    own = given if isinstance(given, list | tuple) else []
    return [{**facts, **item} for item in own if isinstance(item, Mapping)][:MOST_EACH]


def _holds_mappings(given: Mapping[str, Any]) -> bool:
    """Return whether a field is a mapping of items, and not one item."""
    return bool(given) and all(isinstance(own, Mapping) for own in given.values())


def _first_filled(say: Say, words: Mapping[str, Any]) -> str:
    known = {name: value for name, value in words.items() if value is not None}
    templates = (say,) if isinstance(say, str) else say
    found = (filled(one, known) for one in templates)
    return next((line for line in found if line), "")


def _unseen_lines(section: Section) -> list[str]:
    given = section.get(UNSEEN)
    if not isinstance(given, Mapping) or not given:
        return []
    named = [unseen(what, why) for what, why in given.items()]
    return [f"not seen: {', '.join(named)}"]


def unseen(what: str, why: object) -> str:
    """Name a thing that was not seen, with the reason.

    >>> unseen("targets", "fused_loss")
    'the targets (fused loss)'
    """
    words = card_words()
    what = what.rpartition(".")[2]
    named = words.unseen.get(what, what.replace("_", " "))
    reason = words.reasons.get(str(why), str(why).replace("_", " "))
    return f"{named} ({reason})" if reason else named


def _ranks(name: str, card: Card) -> Iterator[str]:
    """Yield a line for each fact in which the ranks differ."""
    for key, values in card.differing.items():
        section, _, what = key.partition(".")
        if section == name:
            shown = ", ".join(map(str, values[:4]))
            more = f", … ({len(values)} ranks)" if len(values) > 4 else ""
            yield f"differs between ranks: {what.replace('_', ' ')} {shown}{more}"


def _opening(card: Card, name: str, codes: Sequence[str]) -> str:
    """Return one line that joins the short forms of several facts."""
    shorts = [text for one, text in shorts_of(card) if one.code in codes]
    return f"{name}: {', '.join(shorts)}" if shorts else ""


def shorts_of(card: Card) -> Iterator[tuple[LineTemplate, str]]:
    """Yield the short form of every fact that has one, in the order of the card."""
    for one in card_words().lines:
        if one.short and isinstance(card.sections.get(one.section), Mapping):
            facts = _facts(card, one.section)
            yield from ((one, text) for text in _said(one, one.short, facts))


Differences = list[tuple[str, list[str]]]
"""A section of the card, and what each run's card says where they differ."""
NOTHING = "–"


def differences(cards: Mapping[str, Card]) -> Differences:
    """Return in what the cards of several runs differ, line by line."""
    said = [dict(_comparable(card)) for card in cards.values()]
    codes = [one.code for one in card_words().lines if any(one.code in s for s in said)]
    rows = [(_title(code), [s.get(code, NOTHING) for s in said]) for code in codes]
    return [(title, cells) for title, cells in rows if len({*cells}) > 1]


def difference_sentence(cards: Mapping[str, Card]) -> str:
    """Return the first difference in words: "B shifts labels twice, A once".

    Only facts that have a short form with a verb are said so, and runs that say the
    same are named together.
    """
    if not all(cards.values()):
        return ""
    said = {label: dict(_shorts(card)) for label, card in cards.items()}
    for one in card_words().lines:
        found = {label: own[one.code] for label, own in said.items() if one.code in own}
        if one.verb and len(found) == len(cards) and len({*found.values()}) > 1:
            groups: dict[str, list[str]] = {}
            for label, text in reversed(found.items()):
                groups.setdefault(text, []).append(label)
            parts = [f"{' and '.join(who)} {text}" for text, who in groups.items()]
            return ", ".join(parts)
    return ""


def _comparable(card: Card) -> Iterator[tuple[str, str]]:
    """Yield code and text of each line that does not change from step to step."""
    found: dict[str, list[str]] = {}
    for name in card.sections:
        for one, line in section_lines(name, card):
            if not one.varies:
                found.setdefault(one.code, []).append(line)
    yield from ((code, "; ".join(lines)) for code, lines in found.items())


def _shorts(card: Card) -> Iterator[tuple[str, str]]:
    yield from ((one.code, text) for one, text in shorts_of(card))


def _title(code: str) -> str:
    return card_words().titles[code.partition(".")[0]]
