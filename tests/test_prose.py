"""The prose check names a pattern that became more frequent, with the line it is in."""

import pytest

from tests.prose import PATTERNS, found, is_read, more_frequent

OLD = ['"""Return what is the matter."""\n', "every so many steps\n"]


def test_moving_and_mending_are_free() -> None:
    assert [*more_frequent(found(OLD), found(OLD[::-1]))] == []
    assert [*more_frequent(found(OLD), found(["every N steps\n"]))] == []


def test_a_new_line_is_printed_with_the_better_form() -> None:
    (message,) = more_frequent(found(OLD), found([*OLD, "  at so many places\n"]))
    assert "\n  at so many places" in message and "every N steps" in message
    assert "every so many" not in message


def test_each_pattern_is_found_by_itself() -> None:
    lines = (
        "Say what happened",
        "it is no optimiser",
        "so many steps",
        "made anew",
        "# Of longer sequences 512 queries are read",
        "a loss of .03 %",
        "somebody's model",
    )
    hits = [[p for p, held in found([line]).items() if held] for line in lines]
    assert sorted(hits) == sorted([pattern] for pattern in PATTERNS)


@pytest.mark.parametrize(
    "line",
    ["x is no longer read", "0.03 %", "is not a model", "Often", "the mean of rows"],
)
def test_plain_english_is_not_found(line: str) -> None:
    assert not any(lines for lines in found([line]).values())


def test_history_and_the_patterns_themselves_are_not_read() -> None:
    assert is_read("README.md") and is_read("src/equipoise/a.py")
    assert not is_read("CHANGELOG.md") and not is_read("tests/prose.py")
    assert not is_read("docs/images/report.png")
