"""Values to bytes and back, without losing a bit.

Axes, in this file:  W values of a row (R rows): all sites, and within a site its heads.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Fixed byte order: a run written on one machine is read on another.
NARROW, WIDE = np.dtype("<f4"), np.dtype("<f8")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns of a row belong to which site."""

    sites: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.widths[:-1], initial=0))

    @property
    def is_flat(self) -> bool:
        """Say whether every site has a single value."""
        return self.width == len(self.sites) and 0 not in self.widths

    def columns(self) -> dict[str, slice]:
        return {
            site: slice(start, start + width)
            for site, start, width in zip(
                self.sites, self.starts, self.widths, strict=True
            )
        }

    def to_json(self) -> str:
        return json.dumps([self.sites, self.widths], separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Layout":
        sites, widths = json.loads(line)
        return cls(tuple(sites), tuple(widths))


def pack(x_RW: Array) -> list[bytes]:
    """Return each row in 4 bytes a value if that is exact to the bit, else in 8.

    Probes mostly emit fp32, so this halves the file; a loss summed in fp64, 1e-60 or
    1e39 keeps its 8 bytes. NaN payloads count as bits.
    """
    exact_R = np.logical_and.reduce(_same_if_narrow(x_RW), axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow_RW, wide_RW = x_RW.astype(NARROW), x_RW.astype(WIDE)
    both = zip(exact_R.tolist(), narrow_RW, wide_RW, strict=True)
    return [(small if exact else large).tobytes() for exact, small, large in both]


def is_narrow(x: Array) -> bool:
    """Say whether 4 bytes a value hold every bit.

    >>> is_narrow(np.array([0.5, np.inf])), is_narrow(np.array([0.1]))
    (True, False)
    """
    return bool(_same_if_narrow(x).all())


def _same_if_narrow(x: Array) -> NDArray[np.bool_]:
    with np.errstate(over="ignore", invalid="ignore"):
        back = x.astype(NARROW).astype(np.float64)
    same = back.view(np.int64) == np.ascontiguousarray(x).view(np.int64)
    return np.asarray(same, np.bool_)


def unpack(blobs: Sequence[bytes], width: int) -> Array:
    """Return the rows as one array of shape (rows, width)."""
    x_RW = np.empty((len(blobs), width))
    for start, stop in alike(blobs):
        dtype = NARROW if len(blobs[start]) == width * NARROW.itemsize else WIDE
        x = np.frombuffer(b"".join(blobs[start:stop]), dtype)
        x_RW[start:stop] = x.reshape(stop - start, width)
    return x_RW


def alike(blobs: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield runs of rows of equal length: one conversion each instead of one a row."""
    lengths = np.fromiter(map(len, blobs), np.int64, len(blobs))
    cuts = (np.flatnonzero(np.diff(lengths)) + 1).tolist()
    edges = [0, *cuts, len(blobs)]
    yield from ((a, b) for a, b in pairwise(edges) if a < b)
