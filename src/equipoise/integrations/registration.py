"""``report_to="equipoise"`` and ``log_with="equipoise"``: our names in others' tables.

transformers and Accelerate look their loggers up in a table by name. Ours is entered
when both packages are imported, in either order: at once where the table is there,
otherwise after the module that holds it was executed. Neither is imported here, nor is
torch; an entry loads its class when it is called for.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "equipoise"


class ReportTo:
    """The class that a Trainer makes a callback of; it makes ours."""

    def __new__(cls) -> Any:
        return _made("hf", "EquipoiseCallback").reporting()


class LogWith:
    """The class that an Accelerator makes a tracker of; it makes ours."""

    name = NAME
    requires_logging_directory = False

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _made("accelerate", "EquipoiseTracker")(*args, **options)


TABLES = {
    "transformers.integrations.integration_utils": (
        "INTEGRATION_TO_CALLBACK",
        ReportTo,
    ),
    "accelerate.tracking": ("LOGGER_TYPE_TO_CLASS", LogWith),
}
"""Module → its table, and our entry."""


def register() -> None:
    """Enter our name into each table: now, or when its module is imported."""
    for name in TABLES:
        if name in sys.modules:
            _enter(sys.modules[name])
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _made(module: str, name: str) -> Any:
    # By name: this module is imported with the package, and loads no trainer.
    return getattr(import_module(f"{__package__}.{module}"), name)


def _enter(module: ModuleType) -> None:
    table, entry = TABLES[module.__name__]
    found = getattr(module, table, None)
    if isinstance(found, dict):
        found.setdefault(NAME, entry)


class _AfterImport:
    """A finder that finds nothing itself: it adds one call after a module ran."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TABLES:
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader)
        return spec

    def _found_by_others(self, *asked: Any) -> ModuleSpec | None:
        others = (f for f in sys.meta_path if not isinstance(f, _AfterImport))
        found = (f.find_spec(*asked) for f in others if hasattr(f, "find_spec"))
        return next((spec for spec in found if spec is not None), None)


def _call_after(loader: Any) -> None:
    """Enter our name once this loader has executed its module."""
    execute: Callable[[ModuleType], None] = loader.exec_module

    def execute_and_enter(module: ModuleType) -> None:
        execute(module)
        _enter(module)

    try:
        loader.exec_module = execute_and_enter
    except AttributeError:
        pass  # a loader without attributes of its own: the table stays as it is
