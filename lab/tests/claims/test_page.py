"""The page of the claims is readable on a phone, in light and in dark."""

from pathlib import Path

import pytest

from equipoise_lab.claims.page import write_claims
from equipoise_lab.claims.result import ClaimResult
from tests.report.test_browser import browser, shows_a_study

__all__ = ["browser"]

pytestmark = pytest.mark.needs("chromium")
LONG_CLAIM = ClaimResult(
    id="emadi2026.made",
    paper="emadi2026",
    where="Thm 1",
    kind="theorem",
    statement="a statement of many words " * 9,
    verdict="refuted",
    evidence={"gap": 1.0},
    instead="what is true, in many words " * 9,
)


def test_the_page_of_claims(browser, tmp_path: Path) -> None:
    shows_a_study(browser, write_claims([LONG_CLAIM] * 3, tmp_path / "claims.html"))
