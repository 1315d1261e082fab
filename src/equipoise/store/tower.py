"""The unfinished bins of all series that share a layout, as their writer holds them.

They rise together: 40 quantities of a sampled step cost a handful of array operations,
not 40 times a handful.
"""

from collections.abc import Iterator

import numpy as np

from equipoise.store.packing import Layout
from equipoise.store.pyramid import FAN, Bins, Integers, joined, merged, no_bins

Risen = tuple[int, Integers, Bins]
"""Level, the slots that completed something, and their bins, slot after slot."""


class _Level:
    """Up to FAN bins waiting in each slot."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._fill = np.zeros(0, np.int64)
        self._bins = no_bins(layout)

    def add(self, slots: Integers, bins: Bins) -> Integers:
        """Add one bin to each slot; return those that are full now."""
        self._reserve(int(slots.max()) + 1)
        fill = self._fill[slots]
        self._bins.put(slots * FAN + fill, bins)
        self._fill[slots] = fill + 1
        full: Integers = slots[fill == FAN - 1]
        return full

    def taken(self, full: Integers) -> Bins:
        """Return the bins of some full slots, and empty them."""
        self._fill[full] = 0
        return self._bins[np.add.outer(full * FAN, np.arange(FAN)).ravel()]

    def _reserve(self, slots: int) -> None:
        missing = slots - len(self._fill)
        if missing > 0:
            self._fill = np.append(self._fill, np.zeros(missing, np.int64))
            self._bins = joined([self._bins, no_bins(self._layout, missing * FAN)])


class Tower:
    """One slot per series; a row in a slot rises as far as it completes bins."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._levels: list[_Level] = []

    def push(self, slots: Integers, bins: Bins, *, level: int = 0) -> Iterator[Risen]:
        """Add one bin to each of some slots, all different; yield what is complete.

        Level 0, a bin per row, is only yielded where a site has several heads:
        elsewhere it is the row itself.
        """
        while len(self._levels) <= level:
            self._levels.append(_Level(self._layout))
        full = self._levels[level].add(slots, bins)
        if not len(full):
            return
        whole = self._levels[level].taken(full)
        if level == 0 and not self._layout.is_flat:
            yield 0, full, whole
        risen = merged(whole, self._layout)
        yield level + 1, full, risen
        yield from self.push(full, risen, level=level + 1)
