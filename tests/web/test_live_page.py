"""The board in a real browser, while a run is written: one board, one browser."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.records import Finding, Reading
from equipoise.store import RunWriter
from equipoise.web.server import BoardOptions, prepared
from tests.conftest import PATIENCE
from tests.report import runs as made
from tests.report.test_browser import browser, until

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.needs("chromium")

NOTIFIED = """
window.notified = [];
const Real = window.Notification;
window.Notification = class extends Real {
  constructor(title, options) {
    super(title, options);
    window.notified.push([title, options.body]);
  }
};"""


@dataclass
class LiveRun:
    """A run that is written while the browser looks."""

    writer: RunWriter
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    step: int = 0

    def go_on(self, steps: int) -> None:
        """Write so many steps of a healthy run."""
        for _ in range(steps):
            slope = np.linspace(0.6, 0.3, made.LAYERS)
            loss = 2 + 5 * math.exp(-self.step / 30)
            readings = made._step(self.step, loss, slope, self.rng, sharp=0.1)
            self.writer.append(readings)
            self.step += 1

    def break_down(self) -> None:
        """Write a loss that is not a number, and what a rule found."""
        finding = Finding.error(self.step, "mine.broke", "the model <b>broke</b>")
        loss = Reading.scalar(self.step, "loss", math.nan)
        self.writer.append([loss], findings=[finding])
        self.step += 1


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("live")
    made.pre_and_post(folder, steps=60)
    with RunWriter(folder / "live.eqp", made._info("live one")) as writer:
        run = LiveRun(writer)
        run.go_on(61)
        yield run


@pytest.fixture(scope="module")
def page(browser: Any, live: LiveRun) -> Iterator[Any]:
    """A page of a board over the live run and two others."""
    folder = Path(live.writer.path).parent
    board = prepared(BoardOptions(directory=folder, port=0, browser=False))
    thread = threading.Thread(target=board.run, daemon=True)
    thread.start()
    origin = board.address.rstrip("/")
    context = browser.new_context(
        base_url=board.address, viewport={"width": 1280, "height": 800}
    )
    context.grant_permissions(["notifications"], origin=origin)
    context.add_init_script(NOTIFIED)
    context.set_default_timeout(1000 * PATIENCE)
    found = context.new_page()
    found.complaints = []
    found.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.on("console", lambda message: found.complaints.append(message.text))
    yield found
    context.close()
    board.server.should_exit = True
    thread.join(PATIENCE)


def judged(page: Any, path: str) -> None:
    page.goto(path)
    page.wait_for_selector(".verdict .pill")
    until(page, "document.querySelector('.surface canvas')?.width > 0")


def test_a_live_run_is_followed_and_tells_when_it_breaks(
    page: Any, live: LiveRun
) -> None:
    judged(page, "run/live")
    page.click("text=Notify me")
    page.evaluate("EQ.state.zoom([20, 40])")
    live.go_on(9)
    until(page, f"document.body.innerText.includes('step {live.step - 1}')")
    assert page.evaluate("EQ.state.window") == [20, 40], "an update lost the zoom"
    page.click("text=Zoom out")
    live.break_down()
    until(page, "document.querySelector('.verdict .pill').innerText === 'Dead'")
    until(page, "window.notified.length > 0")
    titles = page.evaluate("window.notified.map(([title]) => title)")
    assert f"live one, step {live.step - 1}" in titles
    drawn = "[...EQ.surfaces].map((one) => one.box.getAttribute('aria-label'))"
    until(page, f"{drawn}.some((text) => /Loss.* 1 points? .*NaN or Inf/.test(text))")
    # What fired is a pin with its legend; its text is text.
    assert "error" in page.locator(".legend").first.inner_text()
    assert "the model <b>broke</b>" in page.locator("#events").inner_text().lower()
    until(page, "/NaN or Inf/.test(document.querySelector('.changes').innerText)")


def test_what_one_looks_at_is_in_the_address(page: Any, live: LiveRun) -> None:
    judged(page, "run/live")
    heat = page.locator("#heatmaps")
    heat.scroll_into_view_if_needed()
    until(page, "document.querySelectorAll('#heatmaps .surface').length > 0")
    cell = heat.locator(".surface").first
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 20)
    assert "blocks.1" in page.locator(".tip").inner_text()
    page.mouse.click(box["x"] + 300, box["y"] + 20)
    page.wait_for_selector("#explore h3:has-text('head by head')")
    page.evaluate("EQ.state.zoom([10, 50])")
    until(page, "/from=10&to=50/.test(location.hash)")
    asked = page.url
    page.reload()
    page.wait_for_selector("#explore h3:has-text('head by head')")
    assert page.url == asked and "site=blocks.1.attention" in asked
    assert page.evaluate("EQ.state.window") == [10, 50]


def test_a_pinned_baseline_stays(page: Any, live: LiveRun) -> None:
    page.goto("./")
    page.wait_for_selector("text=3 of 3 runs")
    for name in ("pre", "post"):
        page.locator(f"input[aria-label$=' {name} to compare']").focus()
        page.keyboard.press("Space")
    page.keyboard.press("Shift+Tab")
    page.locator("button:has-text('Compare 2')").press("Enter")
    page.wait_for_selector(".parted")
    assert "post-LN first parts from pre-LN" in page.inner_text(".parted")
    page.click("button[aria-label='pin post-LN as baseline']")
    page.wait_for_selector("button[aria-label='baseline: post-LN']")
    page.wait_for_selector(".parted")
    assert "pre-LN first parts from post-LN" in page.inner_text(".parted")
    assert "baseline=post" in page.url and page.complaints == []


def test_seven_tabs_of_a_live_run_are_drawn(page: Any, live: LiveRun) -> None:
    """A browser has six connections for all tabs of one board."""
    tabs = [page.context.new_page() for _ in range(7)]
    for tab in tabs:
        judged(tab, "run/live")
    for tab in tabs:
        tab.close()


def test_a_long_name_makes_no_wide_page(page: Any, live: LiveRun) -> None:
    name = "n" * 20_000
    path = Path(live.writer.path).with_name("wide.eqp")
    site = ("s" * 3000,)
    odd = Reading(step=0, quantity="q" * 2000, sites=site, values=((1.0,),))
    with RunWriter(path, made._info(name)) as writer:
        found = Finding.error(0, "mine.broke", name)
        writer.append([Reading.scalar(0, "loss", 1.0), odd], findings=[found])
    for address in ("./", "run/wide"):
        page.goto(address)
        until(page, "document.body.innerText.includes('nnnnn')")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"]
    path.unlink()
