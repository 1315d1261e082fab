"""Baek's first two experiments on models of this lab, with null predictors beside.

A model is trained in fp32; every few steps its low-precision error is measured by
emulation, and predicted four ways: ours, v1's sum, v2's risk, and ε_mach alone. Within
one format ε_mach is a constant: any correlation it has comes from mixing formats.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.forecast.lead import lead
from equipoise.forecast.lead_published import precision_at_k, published_lead
from equipoise.lab.models import GPT, GPTConfig, ViT, ViTConfig
from equipoise.precision.emulation import Storage
from equipoise.precision.measurement import Bench
from equipoise.precision.prediction import predicted
from equipoise.precision.published import BlockNames, lab_names, published_blocks

Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""A generator → a batch of inputs and targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its data, and the names of its parts."""

    name: str
    model: nn.Module
    draw: Draw
    names: BlockNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
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


def tiny_vit(width: int, draw: Draw, *, image: int, channels: int) -> Subject:
    """Return the paper's Tiny-ViT: depth 2, 4 heads, MLP 2·width, N(0,1) positions."""
    config = ViTConfig(
        width=width,
        depth=2,
        heads=4,
        image=image,
        patch=image // 8 if image >= 16 else 2,
        channels=channels,
        position_std=1.0,
    )
    return Subject(
        name=f"Tiny-ViT {width}",
        model=ViT(config),
        draw=draw,
        names=lab_names(heads=4, causal=False),
    )


def byte_gpt(width: int, draw: Draw, *, context: int) -> Subject:
    """Return a byte-level GPT of two blocks."""
    config = GPTConfig(width=width, depth=2, heads=4, context=context)
    return Subject(
        name=f"GPT {width}", model=GPT(config), draw=draw, names=lab_names(heads=4)
    )


def looks(
    subject: Subject, *, seed: int, steps: int, every: int, formats: tuple[str, ...]
) -> Iterator[Look]:
    """Train, and yield what is measured and predicted every few steps."""
    rng = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(subject.model.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = subject.draw(rng)
        out = subject.model(x)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % every == 0:
            for format in formats:
                yield _look(subject, (seed, step, format), x[:8], float(loss.detach()))


def _look(
    subject: Subject, where: tuple[int, int, str], x: Tensor, loss: float
) -> Look:
    seed, step, name = where
    storage = Storage.named(name)
    blocks = list(subject.model.blocks)  # type: ignore[arg-type]
    paper = published_blocks(subject.model, x, blocks=blocks, names=subject.names)
    return Look(
        subject=subject.name,
        seed=seed,
        step=step,
        format=name,
        loss=loss,
        measured=Bench(subject.model, x).mismatch(storage),
        ours=predicted(subject.model, x, storage=storage).total,
        v1=paper.v1_prediction(storage.format),
        v2=paper.v2_prediction(storage.format),
        kappa_softmax=max(block.kappa_softmax for block in paper.v1),
    )


def tracking(found: list[Look]) -> list[dict[str, float | str]]:
    """Return log-correlation and median ratio of each predictor, within each format.

    The last rows mix formats, where a constant times ε_mach correlates as well as any.
    """
    rows: list[dict[str, float | str]] = []
    formats = list(dict.fromkeys(look.format for look in found))
    for name in [*formats, "all mixed"]:
        some = [look for look in found if name in (look.format, "all mixed")]
        spacing = [Storage.named(look.format).format.spacing for look in some]
        for predictor in ("ours", "v1", "v2", "ε_mach alone"):
            values = (
                spacing
                if predictor[0] == "ε"
                else [getattr(k, predictor) for k in some]
            )
            rows.append({"format": name, "predictor": predictor, **_fit(some, values)})
    return rows


def _fit(some: list[Look], values: list[float]) -> dict[str, float]:
    measured, foreseen = np.log([k.measured for k in some]), np.log(values)
    constant = float(np.ptp(foreseen)) < 1e-12
    r = math.nan if constant else float(np.corrcoef(measured, foreseen)[0, 1])
    return {
        "points": float(len(some)),
        "log-correlation": r,
        "median measured/predicted": float(np.exp(np.median(measured - foreseen))),
    }


def leading(found: list[Look]) -> dict[str, float]:
    """Return what both procedures make of κ_softmax against the measured error."""
    x = [look.kappa_softmax for look in found]
    y = [look.measured for look in found]
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
