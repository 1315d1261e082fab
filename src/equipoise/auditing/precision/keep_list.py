"""Which few modules to keep in high precision to reach an error target.

Squares add, so the best set of a given size is the modules of largest predicted mean
square. The prediction ranks; measurement decides how far down the ranking to go.
Modules that leave the format's range come first: their mean square is not finite.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from equipoise.auditing.precision.emulation import Bench, Storage, all_but
from equipoise.auditing.precision.prediction import Prediction
from equipoise.errors import InputError

FINITE = sys.float_info.max
"""A target that every finite error reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Modules to keep wide, and the error that is left."""

    sites: tuple[str, ...]
    target: float
    measured: float
    predicted: float
    """What the prediction says is left; NaN for a set found by measuring alone."""

    @property
    def reached(self) -> bool:
        return self.measured <= self.target


def kept_by_prediction(
    bench: Bench, prediction: Prediction, *, storage: Storage, target: float
) -> Kept:
    """Return a smallest set by predicted share that measures under the target.

    The prediction gives the order and, scaled to the measured total, a first guess of
    the size; measurements then settle it, and drop what the set can do without: about
    one forward pass per module kept. The target is missed only when keeping every
    module misses it.
    """
    _check(target)
    share = {s: _size(kinds) for s, kinds in prediction.variance.items()}
    order = sorted(share, key=share.__getitem__, reverse=True)
    left = [0.0, *accumulate(share[s] for s in reversed(order))][::-1]
    error = cache(lambda n: bench.mismatch(storage, narrow=all_but(set(order[:n]))))
    scale = error(0) / (prediction.total or math.nan)
    scale = scale if 0 < scale < math.inf else 1.0
    n = next(n for n, rest in enumerate(left) if scale * math.sqrt(rest) <= target)
    while n < len(order) and not error(n) <= target:
        n += 1
    while n > 0 and error(n - 1) <= target:
        n -= 1
    kept, measured = _pruned(bench, order[:n], error(n), storage=storage, target=target)
    return Kept(
        sites=tuple(kept),
        target=target,
        measured=measured,
        predicted=math.sqrt(sum(share[s] for s in order if s not in kept)),
    )


def _size(kinds: Mapping[str, float]) -> float:
    """Return a module's mean square; what is not a number is beyond every number."""
    whole = sum(kinds.values())
    return math.inf if math.isnan(whole) else whole


def _pruned(
    bench: Bench, kept: list[str], measured: float, *, storage: Storage, target: float
) -> tuple[list[str], float]:
    """Return the set without what it can do without, least shares tried first."""
    for site in reversed(kept):
        fewer = [s for s in kept if s != site]
        without = bench.mismatch(storage, narrow=all_but(set(fewer)))
        if without <= target:
            kept, measured = fewer, without
    return kept, measured


def kept_by_measurement(bench: Bench, *, storage: Storage, target: float) -> Kept:
    """Return the set built by keeping, each time, the module whose keeping helps most.

    Every candidate is measured again at every step: modules × kept forward passes.
    For judging the other one.
    """
    _check(target)
    kept: list[str] = []
    measured = bench.mismatch(storage)
    rest = list(bench.sites(storage))
    while not measured <= target and rest:
        with_each = {
            s: bench.mismatch(storage, narrow=all_but({*kept, s})) for s in rest
        }
        best = min(with_each, key=lambda s: _size({s: with_each[s]}))
        rest.remove(best)
        kept.append(best)
        measured = with_each[best]
    return Kept(sites=tuple(kept), target=target, measured=measured, predicted=math.nan)


def _check(target: float) -> None:
    if not target > 0:
        raise InputError(f"the error target must be positive, got {target}")
