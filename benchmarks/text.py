"""Real text that every machine has: the source code of Python's standard library."""

import os
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def standard_library() -> Tensor:
    """Return the bytes of its sorted top-level modules, as tokens."""
    folder = Path(os.__file__).parent
    ours = sys.stdlib_module_names  # not what a distribution or a user put beside them
    paths = sorted(p for p in folder.glob("*.py") if p.stem in ours)
    data = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
