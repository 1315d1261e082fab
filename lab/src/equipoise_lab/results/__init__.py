"""From finished runs to statistics, figures and pages."""

from importlib import import_module
from typing import Any

# Lazy: a module of this package must not load all the others.
_LAZY = {"Row": "finding", "results": "finding", "rows": "finding"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
