"""Slow, obvious versions of ``equipoise.numerics.selection``: one row, its definitions.

numpy, float64, Python loops over keys, pairs and subsets. No inner products: distances
are norms of differences, expectations are means over every subset.
"""

from collections.abc import Collection
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def largest(w: Row, top: int) -> set[int]:
    """Return the indices of the largest weights; a tie goes to the lower index."""
    return set(sorted(range(len(w)), key=lambda i: (-w[i], i))[:top])


def context(w: Row, x: Row, inside: Collection[int]) -> Row:
    return sum((w[i] * x[i] for i in sorted(inside)), np.zeros(x.shape[1]))


def distance(w: Row, x: Row, inside: Collection[int]) -> float:
    """Return Σ over tokens outside of ‖s − w_i x_i‖."""
    s = context(w, x, inside)
    outside = [i for i in range(len(w)) if i not in inside]
    return float(sum(np.linalg.norm(s - w[i] * x[i]) for i in outside))


def expected(w: Row, x: Row, top: int) -> float:
    """Return the mean distance over every subset of this size."""
    sets = list(combinations(range(len(w)), top))
    return sum(distance(w, x, set(inside)) for inside in sets) / len(sets)


def theorem_1(w: Row, x: Row, inside: Collection[int]) -> float:
    """Return the paper's bound for the largest weights, bracket and all."""
    outside = [i for i in range(len(w)) if i not in inside]
    mass = sum(w[i] for i in inside)
    widest = max(np.linalg.norm(x[i] - x[j]) for i in outside for j in inside)
    longest = max(np.linalg.norm(x[j]) for j in inside)
    return float((1 - mass) * widest + longest * (mass * len(outside) - (1 - mass)))


def cosine_distance(a: Row, b: Row) -> float:
    """Return 1 − cos; 1 for a vector without a direction."""
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(1 - a @ b / size) if size > 0 else 1.0


def separability(
    w: Row, x: Row, inside: Collection[int], *, metric: str
) -> tuple[float, float, float]:
    """Return recall, precision and margin from each token's own distance."""
    s = context(w, x, inside)
    far = {
        "euclidean": lambda y: float(np.linalg.norm(y - s)),
        "cosine": lambda y: cosine_distance(y, s),
    }[metric]
    chosen = [far(w[i] * x[i]) for i in sorted(inside)]
    others = [far(w[i] * x[i]) for i in range(len(w)) if i not in inside]
    found = sum(all(d < e for e in others) for d in chosen)
    false = sum(any(e <= d for d in chosen) for e in others)
    N = len(chosen)
    return found / N, N / (N + false), min(others) - max(chosen)
