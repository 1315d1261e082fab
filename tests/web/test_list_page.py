"""The list of runs in a real browser: worst first, in the address, accessible."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.records import Reading, RunInfo
from equipoise.store import RunWriter
from equipoise.web.server import BoardOptions, prepared
from tests.conftest import PATIENCE
from tests.report.runs import pre_and_post
from tests.report.test_browser import browser, until

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.needs("chromium")
HOSTILE = "<img src=x onerror=alert(1)> \u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("list")
    pre_and_post(place, steps=60)
    for n, name in enumerate((HOSTILE, "broken", "third")):
        created = "2026-11-15T20:00:00+00:00"
        details = {"width": 64 * (n % 2), "lr": (1e-3, 1e-4, 1e-3)[n]}
        info = RunInfo(name=name, created=created, version="0", details=details)
        with RunWriter(place / f"run{n}.eqp", info) as writer:
            for step in range(20):
                loss = math.nan if n == 1 and step > 9 else 3.0 - step / 10 + n
                writer.append([Reading.scalar(step, "loss", loss)])
    (place / "no.eqp").write_bytes(b"not a run")
    return place


@pytest.fixture(scope="module")
def page(browser: Any, folder: Path) -> Iterator[Any]:
    board = prepared(BoardOptions(directory=folder, port=0, browser=False))
    thread = threading.Thread(target=board.run, daemon=True)
    thread.start()
    # The page's own policy would refuse the checker's script.
    context = browser.new_context(
        base_url=board.address, viewport={"width": 1280, "height": 800}, bypass_csp=True
    )
    context.set_default_timeout(1000 * PATIENCE)
    found = context.new_page()
    found.complaints = []
    found.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.on("dialog", lambda dialog: found.complaints.append(dialog.message))
    yield found
    context.close()
    board.server.should_exit = True
    thread.join(PATIENCE)


def listed(page: Any, address: str = "./") -> list[str]:
    """Return the names in their order, when every run was read."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("text=6 of 6 runs")
    until(page, "!document.body.innerText.includes('reading…')")
    return page.locator("tbody th a").all_inner_texts()


def test_the_worst_is_first_and_a_name_is_text(page: Any) -> None:
    names = listed(page)
    assert names[:2] == ["broken", "post-LN"] and names[-1] == "pre-LN"
    assert any("<img" in name for name in names)
    first = page.locator("tbody tr").first
    assert "Dead" in first.inner_text() and "NaN or Inf" in first.inner_text()
    assert first.locator("svg.spark circle.broken").count() == 1
    assert "tokens" not in page.locator("thead").inner_text()
    assert page.complaints == []


def test_order_groups_and_columns_are_in_the_address(page: Any) -> None:
    listed(page)
    page.locator("thead button", has_text="last loss").click()
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("last loss")
    page.locator(".picker summary").click()
    page.locator(".picker button", has_text="width").click()
    page.locator("#group").select_option("lr")
    until(page, "location.hash.includes('group=lr')")
    told = page.locator("tbody").inner_text()
    again = listed(page, page.url)
    assert page.locator("tbody").inner_text() == told
    assert page.locator("tr.group").count() == 3  # 0.0001, 0.001, and not set
    assert page.locator("thead").inner_text().split().count("width") == 1
    assert len(again) == 6 and page.complaints == []


def test_a_line_keeps_its_place_while_one_points_at_the_list(
    page: Any, folder: Path
) -> None:
    before = listed(page)
    page.locator("tbody tr").nth(3).hover()
    with RunWriter.resume(folder / "run2.eqp") as writer:
        writer.append([Reading.scalar(20 + n, "loss", math.nan) for n in range(5)])
    until(page, "document.querySelectorAll('svg .broken').length === 2")
    assert page.locator("tbody th a").all_inner_texts() == before
    page.mouse.move(0, 0)
    assert set(listed(page)[:2]) == {"broken", "third"}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_is_accessible(page: Any, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    listed(page)
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_run_page_is_accessible_and_says_its_verdict_in_two_lines(page: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(color_scheme="light")
    page.goto("run/post")
    page.wait_for_selector(".verdict .pill")
    until(page, "document.querySelector('.surface canvas')?.width > 0")
    for part in page.locator(".verdict > .sentence, .verdict .two").all():
        tall = part.evaluate(
            "e => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight)"
        )
        assert tall < 2.6
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
