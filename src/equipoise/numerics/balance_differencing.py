"""Karmarkar and Karp's differencing: the two largest keys to opposite sides, repeat.

Axes, in this file:  n visible key, sorted from large to small.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.balance_compile import compiled
from equipoise.numerics.balance_sorted import Row, Side


@compiled()
def _sink(heap_n: Row, key_n: NDArray[np.int64], size: int) -> None:
    """Restore the heap order after its first entry became smaller."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap_n[child + 1] > heap_n[child]:
            child += 1
        if heap_n[at] >= heap_n[child]:
            return
        heap_n[at], heap_n[child] = heap_n[child], heap_n[at]
        key_n[at], key_n[child] = key_n[child], key_n[at]
        at = child


@compiled()
def differenced(v_n: Row, side_n: Side) -> float:
    """Write the differencing partition into ``side_n``; return its gap.

    Each step replaces the two largest numbers a ≥ b by a - b, which promises that they
    end on opposite sides; reading the promises backwards gives the sides.
    """
    n = v_n.size
    heap_n, key_n = (
        v_n.copy(),
        np.arange(n, dtype=np.int64),
    )  # sorted from large to small is a heap
    kept, hung = np.empty(n, np.int64), np.empty(n, np.int64)
    for step in range(n - 1):
        first, first_key, size = heap_n[0], key_n[0], n - step
        heap_n[0], key_n[0] = heap_n[size - 1], key_n[size - 1]
        _sink(heap_n, key_n, size - 1)
        kept[step], hung[step] = first_key, key_n[0]
        heap_n[0], key_n[0] = first - heap_n[0], first_key
        _sink(heap_n, key_n, size - 1)
    side_n[key_n[0]] = 0
    for step in range(n - 2, -1, -1):
        side_n[hung[step]] = 1 - side_n[kept[step]]
    gap: float = heap_n[0] / 2
    return gap
