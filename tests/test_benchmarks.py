"""What ``./dev bench`` lists can be run, and nothing else is listed."""

import pytest

from benchmarks.__main__ import main, names


def test_only_what_can_be_run_is_listed() -> None:
    assert {"balance_speed", "lipschitz", "trainer"} <= set(names())
    assert not {"__main__", "paired", "results", "table"} & set(names())


def test_a_misspelt_name_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balanse"]) == 2 and "balance_speed" in capsys.readouterr().out
