"""Notices that torch.compile traces a call of ours into somebody's compiled code.

What is traced never runs again as Python: whatever it was to tell, it will not tell.
While tracing, a function marked constant is really called, and nothing of it ends up in
the graph: the one moment at which to say so.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

_told: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def listens(handle: Any, number: int) -> None:
    """Have ``handle.traced()`` called when ``tell(number)`` is traced."""
    _told[number] = handle


def _tell(number: int) -> bool:
    handle = _told.get(number)
    if handle is not None:
        handle.traced()
    return True


# As torch.compiler.assume_constant_result does, which would import all of dynamo here.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
tell: Callable[[int], bool] = _tell
