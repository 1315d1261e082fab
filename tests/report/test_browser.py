"""The page in a real browser: four figures drawn, nothing asked of the network."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from equipoise.report.html import write_report
from tests.report.runs import pre_and_post

pytestmark = pytest.mark.needs("chromium")


@dataclass
class Visit:
    """What the browser did and complained of."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(pre_and_post(folder, steps=60), folder / "report.html")


def visit(browser, report: Path, *, width: int, scheme: str = "light"):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    page, seen = context.new_page(), Visit()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=true]")
    return page, seen


def line_colours(page) -> list[str]:
    return page.eval_on_selector_all(
        "#plot-loss .scatterlayer path.js-line", "all => all.map(p => p.style.stroke)"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_four_figures_are_drawn(browser, report: Path, width: int) -> None:
    page, seen = visit(browser, report, width=width)
    assert seen.requests == [report.as_uri()] and seen.complaints == []
    for key in ("loss", "gradient", "theta", "layers"):
        lines = page.locator(f"#plot-{key} .scatterlayer path.js-line")
        assert lines.count() >= 2
        box = page.locator(f"#plot-{key} .main-svg").first.bounding_box()
        assert box["width"] > 250 and box["height"] > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.locator("main > section").first
    assert first.get_attribute("class") == "verdict error"


def test_dark_mode_and_print_change_the_ink(browser, report: Path) -> None:
    page, seen = visit(browser, report, width=1280, scheme="dark")
    dark = line_colours(page)
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(500)
    assert line_colours(page) != dark and seen.complaints == []
    assert page.pdf()[:4] == b"%PDF"
