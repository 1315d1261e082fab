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


def opened(
    browser, file: Path, *, width: int, scheme: str = "light", fragment: str = ""
):
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    context.set_default_timeout(1000 * PATIENCE)
    page, seen = context.new_page(), Visit()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.goto(f"{file.as_uri()}#{fragment}" if fragment else file.as_uri())
    return page, seen


def visit(browser, report: Path, *, width: int, scheme: str = "light"):
    page, seen = opened(browser, report, width=width, scheme=scheme)
    page.wait_for_selector("html[data-drawn=true]")
    return page, seen


def until(page, expression: str, *given: object) -> None:
    """Wait until it is true. The page's own policy forbids playwright's way to wait."""
    for _ in range(20 * 60):
        if page.evaluate(expression, *given):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


INK = """() => [...document.querySelectorAll('.surface canvas:first-child')]
  .filter(c => c.width > 0).map(c => {
    const copy = new OffscreenCanvas(c.width, c.height);
    const ink = copy.getContext('2d', {willReadFrequently: true});
    ink.drawImage(c, 0, 0);
    const data = ink.getImageData(0, 0, c.width, c.height).data;
    let count = 0;
    for (let i = 3; i < data.length; i += 4) if (data[i]) count++;
    return count;
  })"""
"""Pixels with ink, per canvas that was drawn. Read from a copy: Chromium complains of
a canvas that is read often, and this is asked until it is true."""


@pytest.mark.parametrize("width", [1280, 390])
def test_figures_are_drawn_without_network_requests(
    browser, report: Path, width: int
) -> None:
    page, seen = visit(browser, report, width=width)
    page.locator(".surface").first.scroll_into_view_if_needed()  # on a phone
    until(page, f"({INK})().some(n => n > 500)")
    assert seen.requests == [report.as_uri()] and seen.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".verdict .pill").count() == 2
    parted = page.locator("main > .parted")
    assert "post-LN first parts from pre-LN at step 0" in parted.inner_text()
    assert page.locator(".verdict.warn, .verdict.error").count() == 1


@pytest.fixture(scope="module")
def failing_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing_run")
    runs = {"post-LN": pre_and_post(folder, steps=100)["post-LN"]}
    return write_report(runs, folder / "report.html")


def test_the_first_screen_answers_what_where_and_since_when(
    browser, failing_run: Path
) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    card = page.locator(".verdict").first
    assert "blocks.0" in card.inner_text() and "step" in card.inner_text()
    for part in (card, page.locator(".decisive figure").first):
        box = part.bounding_box()
        assert box["y"] + box["height"] <= 900, "below the first screen"
    title = page.locator(".decisive h3").first.inner_text()
    assert title == "Gradient norm from the first layer to the last"
    assert "Pins: a rule fired" in page.locator(".decisive .legend").inner_text()
    changed = page.locator(".answer .changes").inner_text()
    assert "so from the first sample" in changed and "Gradient norm" in changed


SCALES = """() => {
  const kind = (values) => EQ.scaleFor("auto", [values]);
  const ticks = EQ.ticks(EQ.scale("log", 3e-4, 5e-3, 40, 0), 2).length;
  return [kind([1, 0.5]), kind([1, 1e-5]), kind([0, 1, 1e-5]), kind([0, 0, 1]), ticks];
}"""


def test_theta_is_shown_by_its_logarithm_where_it_spans_decades(
    browser, failing_run: Path
) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    assert page.evaluate(SCALES) == ["linear", "log", "log", "linear", 2]


def test_dark_mode_and_print_change_the_ink(browser, report: Path) -> None:
    page, seen = visit(browser, report, width=1280, scheme="dark")
    until(page, f"({INK})().some(n => n > 500)")
    first = "document.querySelector('.surface canvas').toDataURL()"
    dark = page.evaluate(first)
    page.emulate_media(color_scheme="light")
    until(page, f"dark => {first} != dark", dark)
    assert seen.complaints == []
    assert page.pdf()[:4] == b"%PDF"


def test_zoom_by_keys_is_in_the_url_and_comes_back(browser, failing_run: Path) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    page.locator("#curves .surface").first.focus()
    page.keyboard.press("+")
    until(page, "location.hash.includes('from=')")
    zoomed = page.evaluate("EQ.state.window")
    assert zoomed[1] - zoomed[0] < 60
    again, _ = opened(browser, failing_run, width=1280, fragment=page.url.split("#")[1])
    again.wait_for_selector("html[data-drawn=true]")
    assert [round(v) for v in again.evaluate("EQ.state.window")] == [
        round(v) for v in zoomed
    ]
    again.keyboard.press("Tab")
    page.keyboard.press("-")
    until(page, "EQ.state.window === null")


def test_dragging_zooms_and_the_crosshair_is_shared(browser, failing_run: Path) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    chart = page.locator("#curves .surface").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 150, middle)
    assert page.evaluate("EQ.state.cursor") > 0
    assert "step" in page.locator(".tip").inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + 300, middle, steps=4)
    page.mouse.up()
    low, high = page.evaluate("EQ.state.window")
    assert 0 < low < high < 99
    page.mouse.dblclick(box["x"] + 200, middle)
    assert page.evaluate("EQ.state.window") is None


COUNTED = """() => {
  EQ.drawn = [];
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  for (const one of EQ.surfaces) {
    one.box.firstChild.getContext('2d').clearRect = function (...at) {
      EQ.drawn.push(one);
      clear.apply(this, at);
    };
  }
}"""
"""Note which surfaces are drawn from now on."""


def test_zooming_draws_the_visible_range(browser, failing_run: Path) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    far = "[...EQ.surfaces].find((one) => one.box.closest('#heatmaps'))"
    until(page, f"Boolean(EQ.far = {far})")
    page.evaluate("EQ.far.box.scrollIntoView()")
    until(page, "EQ.far.seen")
    page.evaluate("scrollTo(0, 0)")
    until(page, "!EQ.far.visible")
    page.evaluate(COUNTED)
    page.evaluate("EQ.state.zoom([10, 30])")
    until(page, "EQ.drawn.length > 0")
    page.wait_for_timeout(100)
    assert page.evaluate("EQ.drawn.every((one) => one.visible)")
    assert page.evaluate("EQ.far.stale && !EQ.drawn.includes(EQ.far)")
    page.evaluate("EQ.far.box.scrollIntoView()")
    until(page, "!EQ.far.stale && EQ.drawn.includes(EQ.far)")


LISTENING = """() => {
  const on = EQ.state.on;
  EQ.listening = 0;
  EQ.state.on = (kind, listener) => {
    EQ.listening++;
    const off = on(kind, listener);
    return () => { EQ.listening--; off(); };
  };
}"""
"""Count who listens for zoom and crosshair from now on."""
OPEN = """async (name) => {
  EQ.open(name, null, null);
  for (let k = 0; k < 400; k++) {
    await new Promise((done) => setTimeout(done, 25));
    const shown = document.querySelectorAll('#explore .surface').length;
    if (EQ.state.get('quantity') === name && shown > 1) break;
  }
  return [EQ.surfaces.size, EQ.listening];
}"""


def test_opening_one_quantity_after_another_leaves_nothing(
    browser, failing_run: Path
) -> None:
    page, _ = visit(browser, failing_run, width=1280)
    page.evaluate(LISTENING)
    theta, other = "attention.theta.p5", "attention.theta.p50"
    counts = [page.evaluate(OPEN, name) for name in (theta, other, theta, other)]
    assert counts[0][1] > 0 and counts == [counts[0]] * 4
    # At once: numbers of a figure that was closed meanwhile must not draw it.
    names = [theta, other, "gradient.norm"]
    page.evaluate(
        "(names) => names.forEach((name) => EQ.open(name, null, null))", names
    )
    page.wait_for_timeout(500)
    assert page.evaluate(OPEN, theta) == counts[0]


def test_every_quantity_is_reached_by_a_filter(browser, failing_run: Path) -> None:
    page, seen = visit(browser, failing_run, width=1280)
    page.fill("#filter", "theta\\.p(5|50)$")
    assert page.locator(".choices button").all_inner_texts() == [
        "attention.theta.p5",
        "attention.theta.p50",
    ]
    page.click(".choices button >> nth=0")
    page.wait_for_selector("#explore figure:not([hidden]) >> nth=2")
    assert "quantity=attention.theta.p5" in page.url
    titles = page.locator("#explore figure:not([hidden]) h3").all_inner_texts()
    assert [t.split(",")[-1].strip() for t in titles][-1] == "head by head"
    assert seen.complaints == []


UNNAMED = """() => [...document.querySelectorAll(
    'button, a, input, select, [tabindex="0"], [role=group], [role=region]')]
  .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.title
     || (e.id && document.querySelector(`label[for="${e.id}"]`))
     || e.getAttribute('aria-labelledby')))
  .map(e => e.outerHTML.slice(0, 80))"""


def test_every_focusable_element_has_a_name(browser, report: Path) -> None:
    """The whole audit is ``python -m benchmarks.accessibility``."""
    page, _ = visit(browser, report, width=1280)
    assert page.evaluate(UNNAMED) == []
    assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return study_pages(tmp_path_factory.mktemp("pages"))


def study_pages(folder: Path) -> dict[str, Path]:
    """Return pages about one model, as the commands write them."""
    torch.manual_seed(0)
    model, batch = gpt(), tokens()
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
def test_a_study_page(browser, studies: dict[str, Path], name: str) -> None:
    shows_a_study(browser, studies[name])


def shows_a_study(browser, file: Path) -> None:
    width = 390
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
