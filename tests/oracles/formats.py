"""Number formats the slow way: every code is decoded, and neighbours are searched for.

Shares no formula with ``equipoise.numerics.formats``: no bit is masked, no constant
added. A number is rounded with ``fractions.Fraction`` by comparing exact distances.
"""

from bisect import bisect_left
from fractions import Fraction

from equipoise.numerics.formats import Format


def numbers(format: Format) -> list[Fraction]:
    """Return every non-negative finite number of the format, in code order."""
    mantissas = 2 ** (format.significand - 1)
    top = 2**format.exponent - (0 if format.finite_only else 1)
    codes = range(top * mantissas - (1 if format.finite_only else 0))
    bias = 2 ** (format.exponent - 1) - 1
    return [_decoded(code, mantissas, bias) for code in codes]


def _decoded(code: int, mantissas: int, bias: int) -> Fraction:
    exponent, mantissa = divmod(code, mantissas)
    fraction = Fraction(mantissa, mantissas)
    if exponent == 0:
        return fraction * Fraction(2) ** (1 - bias)
    return (1 + fraction) * Fraction(2) ** (exponent - bias)


def nearest(x: float, grid: list[Fraction]) -> Fraction | None:
    """Return the grid point nearest to |x|, ties to the even code; None if beyond."""
    exact = abs(Fraction(x))
    beyond = 2 * grid[-1] - grid[-2]
    candidates = [*grid, beyond]
    i = min(bisect_left(candidates, exact), len(candidates) - 1)
    below = max(i - 1, 0)
    gaps = {j: abs(candidates[j] - exact) for j in (below, i)}
    best = min(gaps.values())
    tied = [j for j, gap in gaps.items() if gap == best]
    winner = tied[0] if len(tied) == 1 else next(j for j in tied if j % 2 == 0)
    return None if winner == len(grid) or exact > beyond else candidates[winner]
