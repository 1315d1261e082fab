"""Codes and parameters become words: a few renderings in full, and what never breaks.

Wording is pinned in ``golden.toml`` alone, by at most 60 renderings.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equipoise.records import Finding
from equipoise.text.render import in_one_line, render

GOLDEN = tomllib.loads((Path(__file__).parent / "golden.toml").read_text())["rendering"]


def finding(code: str, **params: Any) -> Finding:
    return Finding.warn(7, code, site="h.2", **params)


@pytest.mark.parametrize("one", GOLDEN, ids=lambda one: one["code"])
def test_words(one: dict[str, Any]) -> None:
    made = Finding(
        step=one.get("step", 0),
        severity="warn",
        code=one["code"],
        site=one.get("site", ""),
        params=one.get("params", {}),
    )
    found = render(made)
    assert (found.message, found.advice) == (one["message"], one.get("advice", ""))
    assert render(found) == found, "words are made again from code and parameters"


def test_wording_is_pinned_by_few() -> None:
    assert len(GOLDEN) <= 60


def test_an_unknown_code_shows_what_was_stored() -> None:
    stored = replace(finding("of.tomorrow", x=1), message="it broke", advice="mend it")
    assert render(stored) == stored


def test_parameters_that_do_not_fit_show_what_was_stored() -> None:
    stored = replace(finding("watch.budget", interval=4), message="every 4 steps")
    assert render(stored) == stored
    wrong = finding("watch.budget", interval=4, every=1, ratio="much", budget=0.1)
    assert render(replace(wrong, message="every 4 steps")).message == "every 4 steps"


def test_a_finding_without_any_words_shows_its_code_and_parameters() -> None:
    assert render(finding("of.tomorrow", x=1)).message == "of.tomorrow: x = 1"
    assert render(finding("of.tomorrow")).message == "of.tomorrow"


def test_a_number_that_is_not_finite_is_named_after_a_trip_through_json() -> None:
    given = {"interval": 4, "every": 1, "budget": 0.1}
    made = finding("watch.budget", ratio=float("inf"), **given)
    back = Finding.from_json(made.to_json())
    assert render(back).message == render(made).message
    assert "inf" in render(back).message


def test_an_error_says_what_to_do_in_the_same_line() -> None:
    found = render(finding("watch.silent.no_loss"))
    assert in_one_line(found) == f"{found.message}; {found.advice}"
    assert in_one_line(finding("of.tomorrow")) == "of.tomorrow"
