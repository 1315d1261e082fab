"""The card: facts in, lines out; an absent fact makes no line and no error."""

import itertools
from typing import Any

from equipoise.judging.card import Card
from equipoise.judging.facts import Facts
from equipoise.text.card import card_words, unseen, worded


def facts(step: int, *ranks: dict[str, Any]) -> Facts:
    return Facts(step=step, ranks=ranks)


def test_later_facts_replace_earlier_ones_and_the_rest_stays() -> None:
    card = Card().after(facts(0, {"loss": {"value": 5.0}, "setup": {"host": "a"}}))
    card = card.after(facts(1, {"loss": {"value": 4.0, "shift": 1}}))
    assert card.sections == {
        "loss": {"value": 4.0, "shift": 1},
        "setup": {"host": "a"},
    }
    assert card.first["loss"] == {"value": 5.0}
    assert (card.step, card.samples) == (1, 2)


def test_ranks_that_differ_are_named_field_by_field() -> None:
    card = Card().after(
        facts(
            0, {"setup": {"seed": 1, "host": "a"}}, {"setup": {"seed": 2, "host": "a"}}
        )
    )
    assert card.differing == {"setup.seed": [1, 2]} and card.ranks == 2
    assert any("seed 1, 2" in line for line in worded(card).text["Set-up"])


def test_it_comes_back_from_json() -> None:
    card = Card().after(facts(3, {"loss": {"value": float("nan"), "list": [1, "a"]}}))
    again = Card.from_json(card.to_json())
    assert (again.step, again.sections["loss"]["list"]) == (3, [1, "a"])


def test_what_was_not_seen_is_named_with_its_reason() -> None:
    card = Card().after(facts(0, {"loss": {"unseen": {"targets": "fused_loss"}}}))
    assert card.unseen == {"loss.targets": "fused_loss"}
    assert worded(card).text["Loss"] == ("not seen: the targets (fused loss)",)
    assert unseen("new_thing", "odd_reason") == "new thing (odd reason)"


HOSTILE: list[Any] = [
    None,
    {},
    [],
    "",
    "text",
    -1,
    float("nan"),
    "nan",
    {"a": None},
    [{}],
    True,
]


def test_no_fact_of_any_shape_breaks_a_line() -> None:
    """Every field that a template names, absent or of a wrong shape."""
    import string

    fields = {
        name.partition("[")[0].partition(".")[0]
        for line in card_words().lines
        for say in (line.say, line.short)
        for text in _texts(say)
        for _, name, _, _ in string.Formatter().parse(text)
        if name
    } | {line.each or line.by for line in card_words().lines}
    for value, titled in itertools.product(HOSTILE, card_words().titles):
        worded(Card(sections={titled: dict.fromkeys(fields, value)}))


def _texts(say: Any) -> list[str]:
    if isinstance(say, str):
        return [say]
    parts = say.values() if isinstance(say, dict) else say
    return [text for part in parts for text in _texts(part)]


def test_every_line_belongs_to_a_section_of_the_card() -> None:
    words = card_words()
    assert {line.section for line in words.lines} <= words.titles.keys()
    codes = {line.code for line in words.lines if line.short}
    assert {code for one in words.opening.values() for code in one} <= codes
