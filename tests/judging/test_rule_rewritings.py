"""Every rule says the same of a course that is written in another way.

The same training in a deeper model, with more heads, in other units of the gradient or
the weights, continued at a later step, with other names, or with another optimiser's
rate: what a rule says must not change. What no reading can rewrite (a norm's gain moved
into a matrix) is in `test_invariance.py`, on models.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from equipoise.judging.judge import Judge
from equipoise.judging.rules import RULES
from equipoise.records import Reading
from tests.judging.histories import DETAILS, names
from tests.judging.test_rules import CASES

Course = Iterable[Reading]
Written = tuple[list[Reading], dict[str, Any]]
PER_HEAD = ("attention.theta", "attention.entropy", "attention.max_logit")


def _twice(site: str) -> tuple[str, ...]:
    """Return two layers for one, in its place: ``blocks.1`` is blocks 2 and 3."""
    head, dot, rest = site.partition("blocks.")
    if not dot:
        return (site,)
    number, *more = rest.split(".")
    places = (2 * int(number), 2 * int(number) + 1)
    return tuple(".".join([f"{head}blocks.{place}", *more]) for place in places)


def deeper(course: Course) -> Written:
    """Every layer comes twice."""
    found = []
    for reading in course:
        pairs = zip(reading.sites, reading.values, strict=True)
        rows = [(twin, row) for site, row in pairs for twin in _twice(site)]
        sites, values = zip(*rows, strict=True)
        found.append(replace(reading, sites=sites, values=values))
    blocks = [twin for block in DETAILS["blocks"] for twin in _twice(block)]
    return found, {**DETAILS, "blocks": blocks}


def more_heads(course: Course) -> Written:
    """Every head comes twice."""
    found = []
    for reading in course:
        rows = reading.values
        if reading.quantity.startswith(PER_HEAD):
            rows = tuple((*row, *(value * 0.9995 for value in row)) for row in rows)
        found.append(replace(reading, values=rows))
    return found, dict(DETAILS)


def _times(course: Course, factor: float, start: tuple[str, ...]) -> list[Reading]:
    return [
        replace(
            reading,
            values=tuple(tuple(v * factor for v in row) for row in reading.values),
        )
        if reading.quantity.startswith(start)
        else reading
        for reading in course
    ]


def loss_times_a_thousand(course: Course) -> Written:
    """Gradients are a thousand times as large; Adam's updates are as they were."""
    return _times(course, 1000.0, ("gradient.",)), dict(DETAILS)


def weights_times_eight(course: Course) -> Written:
    """Weights and what moves them, at a rate that is eight times as high."""
    start = ("weight.", "update.norm", "learning_rate")
    return _times(course, 8.0, start), dict(DETAILS)


def continued(course: Course) -> Written:
    """The run begins at step 10,000."""
    return [replace(r, step=r.step + 10_000) for r in course], dict(DETAILS)


def other_names(course: Course) -> Written:
    """Blocks have another name."""
    found = [
        replace(r, sites=tuple(s.replace("blocks.", "model.h.") for s in r.sites))
        for r in course
    ]
    blocks = [block.replace("blocks.", "model.h.") for block in DETAILS["blocks"]]
    return found, {**DETAILS, "blocks": blocks}


def other_optimiser(course: Course) -> Written:
    """SGD's rates are a thousand times Adam's, and so is the move over the rate."""
    return _times(course, 1000.0, ("learning_rate",)), dict(DETAILS)


REWRITINGS: tuple[Callable[[Course], Written], ...] = (
    deeper,
    more_heads,
    loss_times_a_thousand,
    weights_times_eight,
    continued,
    other_names,
    other_optimiser,
)


def said(readings: Course, details: dict[str, Any]) -> tuple[set[str], str]:
    """Return the rules that fire, and the state at the end."""
    judge = Judge(details, rules=tuple(r for r in RULES.values() if r.of == "run"))
    return names(judge.add(readings)) - {"rules.unread"}, judge.verdict.state


@pytest.mark.parametrize("rewriting", REWRITINGS)
@pytest.mark.parametrize("name", CASES)
def test_a_course_written_in_another_way_is_judged_alike(
    name: str, rewriting: Callable[[Course], Written]
) -> None:
    course, within, beyond = CASES[name]
    for value in (within, beyond):
        assert said(*rewriting(course(value))) == said(course(value), dict(DETAILS))
