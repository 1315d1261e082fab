"""Pages in a real browser: all is drawn, nothing is asked of the network."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from equipoise.auditing.curvature import page as sharpness
from equipoise.auditing.curvature.study import study as sharpness_study
from equipoise.auditing.precision import page as precision
from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.study import study as precision_study
from equipoise.auditing.selection import page as selection
from equipoise.auditing.selection import study as selection_study
from equipoise.report.html import write_report
from tests.conftest import PATIENCE
from tests.probes.reading import gpt, tokens
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


def opened(browser, file: Path, *, width: int, scheme: str = "light"):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    context.set_default_timeout(1000 * PATIENCE)
    page, seen = context.new_page(), Visit()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.goto(file.as_uri())
    return page, seen


def visit(browser, report: Path, *, width: int, scheme: str = "light"):
    page, seen = opened(browser, report, width=width, scheme=scheme)
    page.wait_for_selector("html[data-drawn=true]")
    return page, seen


COLOURS = (
    "[...document.querySelectorAll('#plot-loss .scatterlayer path.js-line')]"
    ".map(line => line.style.stroke)"
)


def line_colours(page) -> list[str]:
    return page.evaluate(COLOURS)


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
    assert first.get_attribute("class") == "verdict warn"


def test_dark_mode_and_print_change_the_ink(browser, report: Path) -> None:
    page, seen = visit(browser, report, width=1280, scheme="dark")
    dark = line_colours(page)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"dark => String({COLOURS}) != String(dark)", arg=dark)
    assert seen.complaints == []
    assert page.pdf()[:4] == b"%PDF"


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages about one model, as the commands write them."""
    torch.manual_seed(0)
    folder, model, batch = tmp_path_factory.mktemp("pages"), gpt(), tokens()
    bf16 = precision_study(model, batch, storage=Storage.named("bf16"))
    bent = sharpness_study(model, batch, count=1, probes=1, steps=4)
    heads = selection_study(model, batch)
    return {
        "precision": precision.write_study(bf16, folder / "precision.html"),
        "curvature": sharpness.write_study(bent, folder / "curvature.html"),
        "selection": selection.write_study(heads, folder / "selection.html"),
    }


def ink(page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('body, td')].map(e => getComputedStyle(e).color)"
    )


@pytest.mark.parametrize("name", ["precision", "curvature", "selection"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_about_a_model(
    browser, studies: dict[str, Path], name: str, width: int
) -> None:
    file = studies[name]
    page, seen = opened(browser, file, width=width)
    assert seen.requests == [file.as_uri()] and seen.complaints == []
    # A wide table scrolls in its own box, never the page.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    rows = page.locator("tbody tr")
    assert rows.count() >= 3 and all(row.is_visible() for row in rows.all())
    dark, _ = opened(browser, file, width=width, scheme="dark")
    assert len(set(ink(dark))) == 1 and set(ink(dark)) != set(ink(page))


def test_every_head_has_its_colour(browser, studies: dict[str, Path]) -> None:
    page, _ = opened(browser, studies["selection"], width=1280)
    heads = page.locator("td .head")
    assert heads.count() == 6
    for head in heads.all():
        assert head.evaluate("e => getComputedStyle(e).backgroundColor") != (
            "rgba(0, 0, 0, 0)"
        )
