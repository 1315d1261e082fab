"""An audit of the pages by axe-core: what a screen reader or a keyboard stumbles over.

``python -m benchmarks.accessibility AXE.min.js``; axe-core is not shipped:
``npm install axe-core`` in any folder brings ``node_modules/axe-core/axe.min.js``. A
report of one run, one of two, the pages of a board and of studies are looked at in
light, dark and on a phone.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.board import served
from benchmarks.table import publish
from equipoise.report.html import write_report
from tests.report.runs import pre_and_post
from tests.report.test_browser import study_pages

VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
SERIOUS = ("critical", "serious")


def audited(browser: Any, axe: str, address: str) -> list[dict[str, Any]]:
    """Return one row per look: how many rules it breaks, and which seriously."""
    rows = []
    for name, options in VIEWS.items():
        context = browser.new_context(bypass_csp=True, **options)
        page = context.new_page()
        page.goto(address)
        if page.locator("script").count():  # a study's page is drawn as it comes
            page.wait_for_function("document.querySelector('main').children.length")
        page.wait_for_timeout(1500)
        page.evaluate(axe)
        found = page.evaluate("async () => (await axe.run()).violations")
        serious = [v for v in found if v["impact"] in SERIOUS]
        rows.append(
            {
                "page": address.rsplit("/", 1)[-1] or "board",
                "view": name,
                "violations": len(found),
                "serious": len(serious),
                "which": "; ".join(
                    f"{v['id']} ×{len(v['nodes'])} {v['nodes'][0]['target'][0]}"
                    for v in found
                ),
            }
        )
        context.close()
    return rows


def main() -> None:
    """Audit every page, and print the table."""
    from playwright.sync_api import sync_playwright

    axe = Path(sys.argv[1]).read_text(encoding="utf-8")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        folder = Path(name)
        runs = pre_and_post(folder, steps=60)
        one = write_report({"post-LN": runs["post-LN"]}, folder / "one.html")
        two = write_report(runs, folder / "two.html")
        browser = play.chromium.launch(
            executable_path=binary, args=["--no-sandbox", "--disable-gpu"]
        )
        rows = []
        with served(folder) as (address, *_):
            studies = [page.as_uri() for page in study_pages(folder).values()]
            runs_of_board = [address, f"{address}run/post"]
            for page in (one.as_uri(), two.as_uri(), *runs_of_board, *studies):
                rows += audited(browser, axe, page)
        browser.close()
    publish("accessibility", rows, serious=sum(row["serious"] for row in rows))


if __name__ == "__main__":
    main()
