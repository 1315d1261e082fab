"""Every check states its claim, and a verdict is what the check computed."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from equipoise import claims
from equipoise.claims.verdict import EMADI, Found, Outcome, Verdict

NAMES = [file.stem for file in sorted(Path(claims.__path__[0]).glob("[!_]*.py"))]


def checks(name: str) -> list[str]:
    module = import_module(f"equipoise.claims.{name}")
    found = inspect.getmembers(module, inspect.isfunction)
    return [n for n, f in found if inspect.signature(f).return_annotation is Found]


def test_all_checks_are_found() -> None:
    assert sum(len(checks(name)) for name in NAMES) == 58


@pytest.mark.parametrize("name", NAMES)
def test_every_check_states_its_claim_and_what_is_true(name: str) -> None:
    module = import_module(f"equipoise.claims.{name}")
    for check in checks(name):
        doc = getattr(module, check).__doc__
        assert "\n    Claim: " in doc and "\n    Instead: " in doc, check


@pytest.mark.parametrize("outcome", ["holds", "fails"])
def test_the_verdict_holds_what_the_check_found(outcome: Outcome) -> None:
    @EMADI.claim("Thm 0")
    def check() -> Found:
        """One line.

        Claim: It is
        so: always.

        Instead: Never.
        """
        return outcome, {"evidence": 1.0}

    assert check() == Verdict(
        paper="emadi2026",
        where="Thm 0",
        claim="It is so: always.",
        outcome=outcome,
        evidence={"evidence": 1.0},
        instead="Never.",
    )
