"""Baek's first two experiments on models of this lab, with null predictors beside.

A model is trained in fp32; every few steps its low-precision error is measured by
emulation, and predicted four ways: ours, v1's sum, v2's risk, and twice by nothing:
ε_mach alone, and one constant. Within one format both are constants: any correlation
ε_mach has comes from mixing formats.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.auditing.precision.prediction import predicted
from equipoise_lab.data import Batches, DataOptions, open_data
from equipoise_lab.models import GPT, GPTConfig, ViT, vit_preset
from equipoise_lab.results.lead_lag import lead, precision_at_k, published_lead
from equipoise_lab.studies.fragility.published import published_blocks

PREDICTORS = ("ours", "v1", "v2", "ε_mach alone", "constant")
READ_ON = 4
"""Images, or windows of text, on which errors are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragilityModel:
    """A kind of model, and its data."""

    name: str
    built: Callable[[], nn.Module]
    """Made under the seed set before."""
    batches: Callable[[int], Batches]
    """A seed → its stream of inputs and targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragilityReading:
    """One measurement during training."""

    subject: str
    seed: int
    step: int
    format: str
    loss: float
    measured: float
    ours: float
    v1: float
    v2: float
    kappa_softmax: float
    """v1's, the largest over layers: the paper's early-warning signal."""


COLUMNS = tuple(f.name for f in fields(FragilityReading) if f.name != "subject")


def tiny_vit(width: int, data: DataOptions, *, batch: int = 16) -> FragilityModel:
    """Return the paper's Tiny-ViT of 65 tokens, on digits or on CIFAR-10.

    Digits of 8 × 8 pixels have one pixel a patch, to keep the number of tokens.
    """
    config = replace(vit_preset("baek-tiny"), width=width, ffn_width=2 * width)
    if data.source == "digits":
        config = replace(config, image=8, patch=1, channels=1)
    return FragilityModel(
        name=f"Tiny-ViT {width}, {data.source}",
        built=lambda: ViT(config),
        batches=lambda seed: open_data(data, batch=batch, seed=seed).train,
    )


def byte_gpt(
    width: int, *, depth: int = 2, context: int = 48, batch: int = 8
) -> FragilityModel:
    """Return a byte-level GPT on the embedded text."""
    config = GPTConfig(width=width, depth=depth, heads=4, context=context)

    def batches(seed: int) -> Batches:
        return open_data(DataOptions(), batch=batch, seed=seed, context=context).train

    return FragilityModel(
        name=f"GPT {width}, bytes",
        built=lambda: GPT(config),
        batches=batches,
    )


def readings(
    subject: FragilityModel,
    *,
    seed: int,
    steps: int,
    every: int,
    formats: tuple[str, ...],
) -> Iterator[FragilityReading]:
    """Train, and yield what is measured and predicted every few steps."""
    torch.manual_seed(seed)
    model, batches = subject.built(), subject.batches(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = batches.take()
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % every == 0:
            seen = (subject, seed, step, float(loss.detach()))
            yield from _read(model, x[:READ_ON], seen, formats)


def _read(
    model: nn.Module,
    x: Tensor,
    seen: tuple[FragilityModel, int, int, float],
    formats: tuple[str, ...],
) -> Iterator[FragilityReading]:
    subject, seed, step, loss = seen
    bench, paper = Bench(model, x), published_blocks(model, x)
    for name in formats:
        storage = Storage.named(name)
        yield FragilityReading(
            subject=subject.name,
            seed=seed,
            step=step,
            format=name,
            loss=loss,
            measured=bench.mismatch(storage),
            ours=predicted(model, x, storage=storage).total,
            v1=paper.v1_prediction(storage.format),
            v2=paper.v2_prediction(storage.format),
            kappa_softmax=max(block.kappa_softmax for block in paper.v1),
        )


def predictions(found: list[FragilityReading], predictor: str) -> list[float]:
    """Return what a predictor says at each look; the constant is their mean size."""
    if predictor == "ε_mach alone":
        return [Storage.named(look.format).format.spacing for look in found]
    if predictor == "constant":
        typical = float(np.exp(np.mean(np.log([look.measured for look in found]))))
        return [typical] * len(found)
    return [float(getattr(look, predictor)) for look in found]


def tracking(found: list[FragilityReading]) -> list[dict[str, float | str]]:
    """Return log-correlation and ratios of each predictor, within each format.

    The last rows mix formats, where a constant times ε_mach correlates as well as any.
    """
    rows: list[dict[str, float | str]] = []
    formats = list(dict.fromkeys(look.format for look in found))
    for name in [*formats, "all mixed"]:
        some = [look for look in found if name in (look.format, "all mixed")]
        for predictor in PREDICTORS:
            fit = _fit(some, predictions(some, predictor))
            rows.append({"format": name, "predictor": predictor, **fit})
    return rows


def _fit(some: list[FragilityReading], values: list[float]) -> dict[str, float]:
    measured, foreseen = np.log([k.measured for k in some]), np.log(values)
    constant = float(np.ptp(foreseen)) < 1e-12
    r = math.nan if constant else float(np.corrcoef(measured, foreseen)[0, 1])
    low, middle, high = np.exp(np.percentile(measured - foreseen, [5, 50, 95]))
    return {
        "points": len(some),
        "log-correlation": r,
        "median measured/predicted": float(middle),
        "p5": float(low),
        "p95": float(high),
    }


def leading(
    found: list[FragilityReading], *, against: str = "measured"
) -> dict[str, float]:
    """Return what both procedures make of κ_softmax against the error or the loss."""
    x = [look.kappa_softmax for look in found]
    y = [float(getattr(look, against)) for look in found]
    paper, ours, alarms = published_lead(x, y), lead(x, y), precision_at_k(x, y)
    return {
        "published lag": paper.lag,
        "published r": paper.r,
        "published p": paper.p,
        "lag": ours.lag,
        "r": ours.r,
        "p": ours.p,
        "Precision@K": alarms.published,
        "base rate": alarms.base_rate,
        "lift": alarms.lift,
    }
