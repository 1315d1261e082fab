"""The training loop: options, trainer, checkpoints, process groups."""

from importlib import import_module
from typing import Any

# Lazy: a module of this package must not load all the others.
_LAZY = {"TrainOptions": "options", "TrainResult": "options", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
