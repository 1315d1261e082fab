"""Hooks of the documentation site (``mkdocs.yml``): its nav, and links that leave it.

Pages are written to be read in the repository too, where they may point at files beside
``docs/``. On the site such a link becomes plain text; every other link must lead
somewhere, or the strict build fails.
"""

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SECTIONS = {
    "Quantities": "quantities",
    "Rules": "rules",
    "Checks": "checks",
    "Remedies": "remedies",
    "Theory": "theory",
    "Results": "results",
    "Decisions": "decisions",
}
"""Title in the nav → the folder whose pages it lists."""


def on_config(config: Any) -> Any:
    """Add the pages of each folder, and whatever no section names."""
    nav = list(config["nav"])
    for title, folder in SECTIONS.items():
        pages = _pages(folder)
        if pages:
            nav.append({title: pages})
    named = set(re.findall(r"[\w./-]+\.md", str(nav)))
    rest = [p.name for p in sorted(HERE.glob("*.md")) if p.name not in named]
    config["nav"] = [*nav, {"More": rest}] if rest else nav
    return config


def _pages(folder: str) -> list[str]:
    found = sorted((HERE / folder).rglob("*.md"))
    ordered = sorted(found, key=lambda p: (len(p.parts), p.name != "README.md", p))
    return [p.relative_to(HERE).as_posix() for p in ordered]


def on_page_markdown(text: str, *, page: Any, **more: Any) -> str:
    """Return the page with links to files outside ``docs/`` as plain text."""
    here = (HERE / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        image, label, path, _ = link.groups()
        target = (here / path).resolve()
        outside = not target.is_relative_to(HERE.resolve())
        data = target.suffix in {".json", ".py"} or target.is_dir()
        return label if not image and (outside or data) else link.group()

    return LINK.sub(replaced, text)
