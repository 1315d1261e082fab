"""The study behind ``equipoise precision``: where the error comes from, what to keep.

A smallest set of modules to keep in fp32 is found from the prediction: it gives the
order and a first guess of how far down to go, measurements settle it. Modules that
leave the format's range come first: their mean square is not finite. Also found are the
modules whose numbers a format cannot hold (too large, too small) and norms that lose ε.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import NATIVE, Bench, Storage, all_but
from equipoise.auditing.precision.prediction import Prediction, predicted
from equipoise.auditing.precision.walk import (
    LinearCall,
    numbers_by_module,
    walked,
)
from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.numerics.fragility import RangeUse, epsilon_stored, range_use
from equipoise.records import html_table

FINITE = sys.float_info.max
"""A target that every finite error reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepList:
    """Modules to keep in fp32, and the error that is left."""

    sites: tuple[str, ...]
    target: float
    measured: float
    predicted: float
    """What is left by the prediction; NaN for a set found by measuring alone."""

    @property
    def reached(self) -> bool:
        return self.measured <= self.target


def kept_by_prediction(
    bench: Bench, prediction: Prediction, *, storage: Storage, target: float
) -> KeepList:
    """Return a smallest set by predicted share that measures under the target.

    The prediction gives the order and, scaled to the measured total, a first guess of
    the size; measurements then settle it, and drop what the set can do without. Trials
    sum in float32 where its own deviation is lost in the target; the set they lead to
    is measured in float64, and extended until it reaches the target there. That is
    missed only when keeping every module misses it.
    """
    _check(target)
    share = {s: _size(kinds) for s, kinds in prediction.variance.items()}
    order = sorted(share, key=share.__getitem__, reverse=True)
    left = [0.0, *accumulate(share[s] for s in reversed(order))][::-1]
    scale = bench.keeping(storage) / (prediction.total or math.nan)
    scale = scale if 0 < scale < math.inf else 1.0
    n = next(n for n, rest in enumerate(left) if scale * math.sqrt(rest) <= target)
    error = _measurement(bench, storage, target)
    while n < len(order) and not error(order[:n]) <= target:
        n += 1
    while n > 0 and error(order[: n - 1]) <= target:
        n -= 1
    added = {s: scale * scale * share[s] for s in order[:n]}
    kept = _pruned(error, added, target=target)
    # Where float64 disagrees: back what was left out, the largest first, then the next.
    for site in [s for s in order if s not in kept]:
        if bench.keeping(storage, kept) <= target:
            break
        kept.append(site)
    return KeepList(
        sites=tuple(sorted(kept, key=order.index)),
        target=target,
        measured=bench.keeping(storage, kept),
        predicted=math.sqrt(sum(share[s] for s in order if s not in kept)),
    )


Measurement = Callable[[Iterable[str]], float]
"""Modules kept in fp32 → the error that is left."""


def _measurement(bench: Bench, storage: Storage, target: float) -> Measurement:
    """Return how trials are measured: with sums in float32, where those decide."""
    if bench.settles(storage, target):
        return lambda kept: bench.nearly_keeping(storage, kept)
    return lambda kept: bench.keeping(storage, kept)


def _size(kinds: Mapping[str, float]) -> float:
    """Return a module's mean square; what is not a number is beyond every number."""
    total = sum(kinds.values())
    return math.inf if math.isnan(total) else total


SPARE = 3.0
"""Times the room that is left. Measured mean squares of single modules are rarely below
half the predicted ones (``benchmarks.fragility_models``), and chance moves a measured
error by 1 %, its square by 2 %."""


def _pruned(
    error: Measurement, added: Mapping[str, float], *, target: float
) -> list[str]:
    """Return the set without what it can do without, least shares tried first.

    ``added`` is the mean square that each module would bring back by the prediction.
    One that needs far more than the target has room for is kept without a trial.
    """
    kept = list(added)
    for site in reversed(kept):
        left = error(kept)
        room = (target - left) * (target + left)
        if added[site] > SPARE * room and math.isfinite(added[site]):
            continue
        fewer = [s for s in kept if s != site]
        if error(fewer) <= target:
            kept = fewer
    return kept


def kept_by_measurement(bench: Bench, *, storage: Storage, target: float) -> KeepList:
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
    return KeepList(
        sites=tuple(kept), target=target, measured=measured, predicted=math.nan
    )


def kept_within(
    bench: Bench, prediction: Prediction, *, storage: Storage, numbers: float
) -> KeepList:
    """Return modules that make at most so many wide numbers on the batch.

    Products read narrow numbers here, so what is wide costs no multiplication in
    float32. What only products read need not be wide: keeping it changes nothing. The
    others are taken by predicted share per number while the numbers suffice: all of
    them, or first those that hold no product (sums and norms). The better set stays.
    """
    storage = replace(storage, narrow_products=True)
    size, none = numbers_by_module(*bench.widened), bench.keeping(storage)
    helps = [s for s in size if bench.keeping(storage, [s]) != none]
    kinds = {s: prediction.variance.get(s, {}) for s in helps}
    worth = {s: _results(kinds[s]) / max(1, size[s]) for s in helps}
    orders = (worth.__getitem__, lambda s: ("product" not in kinds[s], worth[s]))
    sets = [_filled(sorted(helps, key=k, reverse=True), size, numbers) for k in orders]
    kept = min(sets, key=lambda sites: bench.keeping(storage, sites))
    measured = bench.keeping(storage, kept)
    return KeepList(
        sites=tuple(kept), target=math.nan, measured=measured, predicted=math.nan
    )


def _filled(order: list[str], size: Mapping[str, int], room: float) -> list[str]:
    """Return the first modules that fit, and later ones where one is too large."""
    kept: list[str] = []
    for site in order:
        if size[site] <= room:
            kept.append(site)
            room -= size[site]
    return kept


def _results(kinds: Mapping[str, float]) -> float:
    """Return what rounding a module's results adds; a product's matrix stays narrow."""
    weight = kinds.get("weight", 0.0) if "product" in kinds else 0.0
    return _size(kinds) - weight


def _check(target: float) -> None:
    if not target > 0:
        raise InputError(f"the error target must be positive, got {target}")


def range_by_module(
    model: nn.Module, batch: Batch, *, storage: Storage
) -> dict[str, RangeUse]:
    """Return, per module, the worst shares over what it stores, parameters included.

    With scaled storage the shares are those after scaling.
    """
    looking = _Looking(storage)
    with torch.no_grad(), walked(model, looking):
        output_of(model, batch)
    return {site: _worst(uses) for site, uses in looking.uses.items() if uses}


def lost_epsilons(model: nn.Module, format: Format) -> dict[str, float]:
    """Return the norms whose ε is rounded to 0 or goes subnormal, with what is left.

    It matters only where the norm itself runs in the format; stock kernels add ε in
    float32.
    """
    found = {}
    for name, module in model.named_modules():
        eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if isinstance(eps, float) and 0 < eps < format.smallest_normal:
            found[name] = epsilon_stored(eps, format)
    return found


@dataclass(slots=True)
class _Looking:
    storage: Storage
    uses: dict[str, list[RangeUse]] = field(default_factory=dict)

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        self._look(site, parameter)
        return parameter

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        if self.storage.stores(kind):
            self._look(site, x)
        return x

    def operand(self, x: Tensor) -> Tensor:
        return x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        return self.stored(site, "weight", nn.functional.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        self._look(site, call.weight)
        y = nn.functional.linear(call.x, call.oriented(call.weight), call.bias)
        return self.stored(site, "product", y)

    def _look(self, site: str, x: Tensor) -> None:
        numbers, scale = x.detach(), self.storage.scale(x.detach())
        numbers = numbers if scale == 1.0 else numbers * scale
        use = range_use(numbers, self.storage.format)
        self.uses.setdefault(site, [])
        if use.overflow == use.overflow:  # NaN: nothing there but zeros
            self.uses[site].append(use)


def _worst(uses: list[RangeUse]) -> RangeUse:
    return RangeUse(
        overflow=max(use.overflow for use in uses),
        subnormal=max(use.subnormal for use in uses),
        flushed=max(use.flushed for use in uses),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """One module."""

    site: str
    predicted: float
    """Relative error of the output if only this module were narrow."""
    measured: float | None
    """The same, by running it; None when not asked for."""
    share: float
    """Of the predicted mean square error."""
    dominant: str
    """What of it contributes most: weight, score, prob, product, …"""
    keep: bool
    range: RangeUse | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionStudy:
    """A model in a format: where the error comes from, how large, what to keep."""

    model: str
    format: str
    scaled: bool
    predicted: float
    measured: float
    native: float | None
    """The device's own dtype, where there is one and the model runs in it."""
    rows: tuple[PrecisionRow, ...]
    """Largest predicted share first."""
    keep_list: KeepList
    lost_epsilons: dict[str, float]
    native_failure: str = ""
    """What the model raises in the device's own dtype: a mask of -1e9 in fp16, say."""

    def __repr__(self) -> str:
        keep = len(self.keep_list.sites)
        error = f"error {self.measured:.3g}, predicted {self.predicted:.3g}"
        return f"PrecisionStudy({self.model} in {self.format}: {error}, keep {keep})"

    def _repr_html_(self) -> str:
        rows = [
            (r.site, f"{r.predicted:.3g}", f"{r.share:.1%}", "fp32" if r.keep else "")
            for r in self.rows
        ]
        return html_table(repr(self), [("module", "error", "share", "keep in"), *rows])


def study(
    model: nn.Module,
    batch: Batch,
    *,
    storage: Storage,
    target: float | None = None,
    every_module: bool = False,
    probes: int = 2,
) -> PrecisionStudy:
    """Return where a model's low-precision error comes from, and what to keep in fp32.

    Args:
        model: anything callable on the batch; a float64 copy is made and measured.
        batch: a tensor, positional arguments, or keyword arguments.
        storage: the format.
        target: error to reach by keeping modules in fp32; half the measured one if
            None, and any finite one where that is not finite.
        every_module: also measure each module alone: one forward pass per module.
        probes: random output probes of the prediction.
    """
    bench = Bench(model, batch)
    # Rounding to what a model is stored in already shows in a wider copy alone.
    subject = (model, batch) if storage.format.bits < 32 else bench.widened
    prediction = predicted(*subject, storage=storage, probes=probes)
    measured = bench.keeping(storage)
    # Opening fused attention alone moves the last digits of float64.
    if target is None and measured < 1e-13:
        raise InputError(f"{storage.format.name} makes no error here: nothing to keep")
    if target is None:
        target = measured / 2 if math.isfinite(measured) else FINITE
    kept = kept_by_prediction(bench, prediction, storage=storage, target=target)
    alone = bench.by_module(storage, prediction.variance) if every_module else {}
    ranges = range_by_module(*subject, storage=storage)
    shares, sizes = prediction.shares, prediction.by_module
    rows = tuple(
        PrecisionRow(
            site=site,
            predicted=sizes[site],
            measured=alone.get(site),
            share=shares[site],
            dominant=prediction.dominant(site),
            keep=site in kept.sites,
            range=ranges.get(site),
        )
        for site in sorted(sizes, key=lambda s: (shares[s], sizes[s]), reverse=True)
    )
    native, native_failure = _native(bench, storage.format)
    return PrecisionStudy(
        model=type(model).__name__,
        format=storage.format.name,
        scaled=storage.scales,
        predicted=prediction.total,
        measured=measured,
        native=native,
        rows=rows,
        keep_list=kept,
        lost_epsilons=lost_epsilons(model, storage.format),
        native_failure=native_failure,
    )


def _native(bench: Bench, format: Format) -> tuple[float | None, str]:
    """Return the error of a native run, or why there is none.

    torch refuses to fill half-precision scores with -1e9, for one.
    """
    if format.name not in NATIVE:
        return None, ""
    try:
        return bench.native_mismatch(format), ""
    except RuntimeError as error:
        return None, str(error).strip().partition("\n")[0]
