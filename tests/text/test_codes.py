"""Every code that the instrument can emit has words, and no words are left over."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from equipoise.autopilot.state import Event, LogEntry
from equipoise.judging.rules import load_rules
from equipoise.text.render import render
from equipoise.text.templates import template, templates
from equipoise.watching import findings
from equipoise.watching.step import coverage

SRC = Path(findings.__file__).parents[1]
MAKERS = {"warn", "error", "info", "Finding"}


def calls() -> Iterator[ast.Call]:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield node


def name_of(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def literals(*nodes: ast.AST) -> list[str]:
    found = (node.value for node in nodes if isinstance(node, ast.Constant))
    return [value for value in found if isinstance(value, str)]


def written_codes() -> set[str]:
    """Codes written where a finding is made: its second argument, or ``code=``.

    One that is made with a message has its words already.
    """
    found: set[str] = set()
    for call in calls():
        worded = len(call.args) > 2 or any(k.arg == "message" for k in call.keywords)
        if name_of(call) in MAKERS and not worded:
            given = [k.value for k in call.keywords if k.arg == "code"]
            found |= {*literals(*call.args[1:2], *given)}
    return {code for code in found if "." in code and " " not in code}


REASONS = sorted(
    {s for c in calls() if name_of(c) == "Reason" for s in literals(*c.args[:1])}
)
NAMED = [value for name, value in vars(findings).items() if name.isupper()]
CODES = {
    *(value for value in NAMED if isinstance(value, str)),
    *findings.PARTIAL_LOSS.values(),
    *(f"{findings.UNREAD}.{why}" for why in coverage.CAUSES.values()),
    *written_codes(),
} - {findings.SILENT, findings.RANK_LOST}


def test_codes_were_found() -> None:
    assert {"probe.failed", "sink.failed", "store.not_saved"} <= CODES
    assert len(CODES) > 20 and len(REASONS) > 25


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_code_has_words(code: str) -> None:
    assert template(code).message or code in load_rules()


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_has_words(reason: str) -> None:
    assert templates()[f"reason.{reason}"].message


def test_reasons_and_codes_of_the_watch_are_all_in_use() -> None:
    known = [code.partition("/")[0] for code in templates()]
    reasons = {code for code in known if code.startswith("reason.")}
    assert reasons == {f"reason.{reason}" for reason in REASONS}
    ours = {code for code in known if code.startswith("watch.")}
    built = {f"{findings.SILENT}.sites", findings.UNREAD, findings.RANK_LOST}
    made = {f"{findings.UNREAD}.no_blocks", f"{findings.UNREAD}.no_norms"}
    assert ours == {code for code in CODES if code.startswith("watch.")} | built | made


@pytest.mark.parametrize("event", get_args(Event))
def test_what_the_autopilot_logs_has_words(event: Event) -> None:
    entry = LogEntry(step=3, event=event, text="halved the learning rate")
    assert render(entry.finding()).message == f"autopilot {event}: {entry.text}"
