"""The run file: one SQLite file between the side that trains and the side that reads.

``docs/store.md`` has the schema, what survives a crash, and how to read a run alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.store.location import run_path, runs_directory

if TYPE_CHECKING:
    from equipoise.store.level_of_detail import Summary
    from equipoise.store.reader import NewRecords, Run, open_run
    from equipoise.store.retrying import RetryingWriter
    from equipoise.store.writer import RunWriter

__all__ = [
    "NewRecords",
    "RetryingWriter",
    "Run",
    "RunWriter",
    "Summary",
    "open_run",
    "run_path",
    "runs_directory",
]

# Resolved on first use (PEP 562): where runs are is asked before NumPy is needed.
_LAZY = {
    "NewRecords": "reader",
    "RetryingWriter": "retrying",
    "Run": "reader",
    "RunWriter": "writer",
    "Summary": "level_of_detail",
    "open_run": "reader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
