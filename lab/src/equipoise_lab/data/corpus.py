"""A corpus of tokens: embedded, from text files, or from token files.

The embedded corpus is the bytes of the standard library's own top-level modules: every
machine has it without a download. It differs between Python versions, hence the hash.
"""

import gzip
import hashlib
import os
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A line of tokens, and where it came from."""

    tokens: npt.NDArray[np.integer]
    vocabulary: int
    info: Mapping[str, str | int] = field(default_factory=dict)
    """Goes into the run's details."""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise InputError(f"the corpus {self._name} is empty: nothing to predict")

    @property
    def _name(self) -> str:
        return str(self.info.get("source", ""))

    def split(self, held_out: float = 0.1) -> tuple["Corpus", "Corpus"]:
        """Return the first part for training and the last for validation."""
        at = int(len(self.tokens) * (1 - held_out))
        return tuple(
            Corpus(tokens=part, vocabulary=self.vocabulary, info=self.info)
            for part in (self.tokens[:at], self.tokens[at:])
        )  # type: ignore[return-value]


@cache
def embedded() -> Corpus:
    """Return the bytes of the sorted top-level modules of the standard library."""
    folder = Path(os.__file__).parent
    ours = sys.stdlib_module_names  # not what a distribution or a user put beside them
    paths = sorted(p for p in folder.glob("*.py") if p.stem in ours)
    data = b"".join(path.read_bytes() for path in paths)
    info = {"source": "standard library", "python": platform.python_version()}
    return from_bytes(data, info)


def text(paths: Sequence[str | Path] | str | Path) -> Corpus:
    """Return the bytes of one or more files, gzipped or not, in the order given."""
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    data = b"".join(unzipped(_found(path)) for path in listed)
    return from_bytes(data, {"source": ", ".join(Path(p).name for p in listed)})


def unzipped(path: Path) -> bytes:
    """Return a file's bytes, unpacked if its name ends in ``.gz``."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from error


def from_bytes(data: bytes, info: Mapping[str, str | int] | None = None) -> Corpus:
    """Return bytes as tokens 0 … 255, with their SHA-256.

    >>> from_bytes(b"ab").tokens.tolist()
    [97, 98]
    """
    known = {**(info or {}), "sha256": hashlib.sha256(data).hexdigest()}
    tokens = np.frombuffer(data, dtype=np.uint8)
    return Corpus(tokens=tokens, vocabulary=256, info={**known, "bytes": len(data)})


def token_file(path: str | Path) -> Corpus:
    """Return a mapped file of GPT-2's tokens in uint16, as nanoGPT's ``train.bin``."""
    found = _found(path)
    size = found.stat().st_size
    if size == 0 or size % 2:
        raise InputError(f"{path} holds {size} bytes: not a file of uint16 tokens")
    tokens = np.memmap(found, dtype=np.uint16, mode="r")
    info: dict[str, str | int] = {"source": found.name, "tokens": len(tokens)}
    return Corpus(tokens=tokens, vocabulary=50257, info=info)


def _found(path: str | Path) -> Path:
    found = Path(path)
    if not found.is_file():
        raise InputError(f"no file {path}")
    return found
