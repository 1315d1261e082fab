"""A run of many programs goes on: past one that hangs or breaks, and after a stop."""

import contextlib
from pathlib import Path

import pytest

from equipoise_lab.mistakes import journal, running, worker
from equipoise_lab.mistakes.case import Case
from lab.benchmarks import mistakes

OPENED = {case.name: case for case in running.load("opened")}
FAST = OPENED["accumulation"]


def missing(wrong: bool, watch: object) -> None:
    raise AssertionError("never run: the process looks the case up by its name")


def test_a_process_that_ends_is_an_outcome_and_the_next_program_runs() -> None:
    absent = Case(name="no_such_case", half="opened", codes=(), source="", run=missing)
    with contextlib.closing(worker.Worker()) as used:
        broken = used.outcome(absent, wrong=False)
        found = used.outcome(FAST, wrong=False)
    assert broken.error == "the process ended with code 1" and not broken.state
    assert not found.error and found.state and found.seconds > 0


def test_a_program_that_takes_too_long_is_ended() -> None:
    with contextlib.closing(worker.Worker(limit=0.1)) as used:
        found = used.outcome(FAST, wrong=False)
    assert found.error == "TimeoutExpired: after 0 s" and not found.state


def test_a_run_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    kept = running.Outcome(case=FAST.name, wrong=False, state="kept before")
    journal.Journal(path).add(kept)
    assert mistakes.run([FAST], journal.Journal(path)) == [kept]


def test_outcomes_of_other_code_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"revision": "another"}\n')
    with pytest.raises(ValueError, match="was begun with other code"):
        journal.Journal(path)
