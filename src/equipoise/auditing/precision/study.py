"""Everything ``equipoise precision`` says about a model, as plain data.

Which modules store numbers a format cannot hold: too large, too small, a lost ε.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import NATIVE, Bench, Storage
from equipoise.auditing.precision.keep_list import FINITE, Kept, kept_by_prediction
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.walk import LinearCall, walked
from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError
from equipoise.numerics.formats import Format
from equipoise.numerics.fragility import RangeUse, epsilon_stored, range_use


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
        self._look(site, x)
        return x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        return self.stored(site, "weight", nn.functional.embedding(ids, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        self._look(site, call.weight)
        y = nn.functional.linear(call.x, call.oriented(call.weight), call.bias)
        return self.stored(site, "product", y)

    def _look(self, site: str, x: Tensor) -> None:
        numbers = x.detach()
        use = range_use(numbers * self.storage.scale(numbers), self.storage.format)
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
    """The device's own dtype, where there is one and the model runs in it."""
    rows: tuple[Row, ...]
    """Largest predicted share first."""
    kept: Kept
    lost_epsilons: dict[str, float]
    native_failure: str = ""
    """What the model raises in the device's own dtype: a mask of -1e9 in fp16, say."""


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
    native, native_failure = _native(bench, storage.format)
    return Study(
        model=type(model).__name__,
        format=storage.format.name,
        scaled=storage.scales,
        predicted=prediction.total,
        measured=measured,
        native=native,
        rows=rows,
        kept=kept,
        lost_epsilons=lost_epsilons(model, storage.format),
        native_failure=native_failure,
    )


def _native(bench: Bench, format: Format) -> tuple[float | None, str]:
    """Return the error of a native run, or why there is none: emulation stands alone.

    torch refuses to fill half-precision scores with -1e9, for one.
    """
    if format.name not in NATIVE:
        return None, ""
    try:
        return bench.native_mismatch(format), ""
    except RuntimeError as error:
        return None, str(error).strip().partition("\n")[0]
