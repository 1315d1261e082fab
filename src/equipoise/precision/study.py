"""Everything ``equipoise precision`` says about a model, as plain data."""

import math
from dataclasses import dataclass

from torch import nn

from equipoise.errors import InputError
from equipoise.numerics.fragility_range import RangeUse
from equipoise.precision.batch import Batch
from equipoise.precision.emulation import Storage
from equipoise.precision.keeping import FINITE, Kept, kept_by_prediction
from equipoise.precision.measurement import NATIVE, Bench
from equipoise.precision.prediction import predicted
from equipoise.precision.ranges import lost_epsilons, range_by_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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
class Study:
    """A model in a format: where the error comes from, how large, what to keep."""

    model: str
    format: str
    scaled: bool
    predicted: float
    measured: float
    native: float | None
    """The device's own dtype, where there is one."""
    rows: tuple[Row, ...]
    """Largest predicted share first."""
    kept: Kept
    lost_epsilons: dict[str, float]


def study(
    model: nn.Module,
    batch: Batch,
    *,
    storage: Storage,
    target: float | None = None,
    every_module: bool = False,
    probes: int = 2,
) -> Study:
    """Return where a model's low-precision error comes from, and what to keep wide.

    Args:
        model: anything callable on the batch; a float64 copy is made and measured.
        batch: a tensor, positional arguments, or keyword arguments.
        storage: the format.
        target: error to reach by keeping modules wide; half the measured one if None,
            and any finite one where that is not finite.
        every_module: also measure each module alone: one forward pass per module.
        probes: random output probes of the prediction.
    """
    bench = Bench(model, batch)
    # Rounding to what a model is stored in already shows in a wider copy alone.
    subject = (model, batch) if storage.format.bits < 32 else bench.widened
    prediction = predicted(*subject, storage=storage, probes=probes)
    measured = bench.mismatch(storage)
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
        Row(
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
    name = storage.format.name
    return Study(
        model=type(model).__name__,
        format=name,
        scaled=storage.scales,
        predicted=prediction.total,
        measured=measured,
        native=bench.native_mismatch(storage.format) if name in NATIVE else None,
        rows=rows,
        kept=kept,
        lost_epsilons=lost_epsilons(model, storage.format),
    )
