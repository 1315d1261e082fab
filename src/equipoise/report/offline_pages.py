"""Offline HTML pages: where one may be written, and the shell that study pages share.

A path is checked before the work, and a page is written in one move.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from equipoise.errors import InputError
from equipoise.report.assets import style

PAGE = (b"<!doctype html", b"<html")


def check_page_path(path: Path) -> Path:
    """Return the path if a page may stand there, or say why not.

    A file that is not a page is never overwritten: the name was probably a slip.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the page, as in {path}/page.html")
    if path.exists() and not _is_page(path):
        raise InputError(f"{path} exists and is not a page: it was not overwritten")
    return _reachable(path)


def check_folder_path(path: Path) -> Path:
    """Return the path if files may be written into a folder there, or say why not."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file: a folder is wanted")
    return _reachable(path)


def _reachable(path: Path) -> Path:
    places = (path.absolute(), *path.absolute().parents)
    above = next(p for p in places if p.is_dir() or (p != places[0] and p.exists()))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"{path}: nothing can be written in {above}")
    return path


def write_page(path: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return where it is."""
    check_page_path(path)
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(f"{path}: {error.strerror}") from error
    return path


def _is_page(path: Path) -> bool:
    with path.open("rb") as opened:
        start = opened.read(200).lstrip().lower()
    return not start or start.startswith(PAGE)


_SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title><style>{{ css }}
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
        border-radius: 8px; padding: 6px 14px }
figure.plain { background: var(--card) }
section > h2:not(:first-child) { margin-top: 26px } .wide + .wide { margin-top: 14px }
{{ page.style }}
</style></head><body>
<header><p class="brand">Equipoise</p><h1>{{ page.heading }}</h1></header>
<main>
<section class="card verdict" aria-label="Summary"><p class="sentence">{{ headline }}
</p>{% if remarks %}<ul>{% for line in remarks %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}</section>
<section>{{ body }}</section>
</main></body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPage:
    """What distinguishes one kind of page: its names, its body, its own style."""

    title: str
    heading: str
    body: str
    """A template; a table stands in ``<div class="wide" tabindex="0">``: it scrolls."""
    style: str = ""

    def write(
        self, path: Path, *, headline: str, remarks: Sequence[str] = (), **values: Any
    ) -> Path:
        """Write the page with these values and return where it is."""
        made = Environment(autoescape=True, undefined=StrictUndefined).from_string
        body = Markup(made(self.body).render(**values))
        page = made(_SHELL).render(
            page=self,
            css=Markup(style()),
            headline=headline,
            remarks=remarks,
            body=body,
        )
        return write_page(path, page)
