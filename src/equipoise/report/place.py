"""Where a page goes: asked before the work, and written in one move."""

import os
from pathlib import Path

from equipoise.errors import InputError

PAGE = (b"<!doctype html", b"<html")


def page_place(path: Path) -> Path:
    """Return the path if a page may stand there, or say why not.

    A file that is not a page is never overwritten: the name was probably a slip.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name the page, as in {path}/page.html")
    if path.exists() and not _is_page(path):
        raise InputError(f"{path} exists and is not a page: it was not overwritten")
    return _reachable(path)


def folder_place(path: Path) -> Path:
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
    page_place(path)
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
