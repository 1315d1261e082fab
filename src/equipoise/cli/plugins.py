"""Commands and models that installed packages bring, by their entry points.

``equipoise.commands``: command → a module like those of ``cli/``; ``HELP`` is its line
in the list of commands. ``equipoise.subjects``: a function that takes a folder and
returns a model and a pair (inputs, targets), or None where the folder is not its own.

An entry point is another package's code: what it raises is said in one line and never
keeps our own commands from working. A name that is taken stays what it is.
"""

import logging
from collections.abc import Collection, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

log = logging.getLogger("equipoise")

COMMANDS, SUBJECTS = "equipoise.commands", "equipoise.subjects"
NOT_INSTALLED = dict.fromkeys(("claims", "lab", "storms"), "equipoise-lab")
"""Command → the package that brings it. The only place that names the laboratory."""


def offered(taken: Collection[str]) -> tuple[dict[str, EntryPoint], list[str]]:
    """Return the commands that packages offer, and a line for each that is refused."""
    found: dict[str, EntryPoint] = {}
    refused = []
    for point in _points(COMMANDS):
        if point.name in taken or point.name in found:
            refused.append(
                f"{package(point)} offers a command {point.name!r}; that name is "
                "taken, so it is ignored"
            )
        else:
            found[point.name] = point
    return found, refused


def _points(group: str) -> list[EntryPoint]:
    """Return each entry point once: an editable install may be found on two paths."""
    found = {(p.name, p.value): p for p in entry_points(group=group)}
    return sorted(found.values(), key=lambda p: (p.name, p.value))


def package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def problem(point: EntryPoint, error: Exception) -> str:
    """Return the line that says that a package's entry point cannot be loaded."""
    lines = str(error).strip().splitlines() or ["no message"]
    return (
        f"{package(point)} cannot be loaded ({type(error).__name__}: {lines[0]}); "
        f"repair or uninstall it"
    )


def subject_in(folder: Path) -> tuple[Any, Any] | None:
    """Return the model and batch that a package makes of a folder, if one does."""
    for opened in _openers():
        found: tuple[Any, Any] | None = opened(folder)
        if found is not None:
            return found
    return None


def _openers() -> Iterator[Any]:
    for point in _points(SUBJECTS):
        try:
            opener = point.load()
        # A boundary: another package's module may raise anything while it is imported.
        except Exception as error:
            log.warning("equipoise: %s", problem(point, error))
        else:
            yield opener
