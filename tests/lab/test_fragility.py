"""Baek's experiments run, and their summaries say what the numbers say."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.lab.fragility import Look, byte_gpt, leading, looks, tiny_vit, tracking
from equipoise.lab.recipes import recipe
from equipoise.lab.training import TrainOptions


def pictures(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1, 8, 8, generator=rng), torch.tensor([0, 1, 2, 3])


def words(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, 256, (2, 9), generator=rng)
    return rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize("kind", ["vit", "gpt"])
def test_looks_measure_and_predict(kind: str) -> None:
    torch.manual_seed(0)
    subject = (
        tiny_vit(16, pictures, image=8, channels=1)
        if kind == "vit"
        else byte_gpt(16, words, context=8)
    )
    found = list(looks(subject, seed=0, steps=3, every=2, formats=("bf16", "fp16")))
    assert [(k.step, k.format) for k in found] == [
        (0, "bf16"),
        (0, "fp16"),
        (2, "bf16"),
        (2, "fp16"),
    ]
    assert all(0.4 < k.measured / k.ours < 2.5 for k in found)
    assert all(k.v1 > 10 * k.measured for k in found)


def look(step: int, format: str, measured: float, v1: float) -> Look:
    return Look(
        subject="m",
        seed=0,
        step=step,
        format=format,
        loss=1.0,
        measured=measured,
        ours=measured / 2,
        v1=v1,
        v2=1.0,
        kappa_softmax=math.sin(step) + 2,
    )


def test_tracking_separates_formats() -> None:
    found = [look(i, "bf16", 1e-2 * (1 + i), 5.0 - i) for i in range(4)]
    found += [look(i, "fp16", 1e-3 * (1 + i), 5.0 - i) for i in range(4)]
    rows = {(row["format"], row["predictor"]): row for row in tracking(found)}
    assert rows["bf16", "ours"]["log-correlation"] == pytest.approx(1)
    assert rows["bf16", "ours"]["median measured/predicted"] == pytest.approx(2)
    assert rows["bf16", "v1"]["log-correlation"] < -0.9  # type: ignore[operator]
    assert math.isnan(rows["bf16", "ε_mach alone"]["log-correlation"])  # type: ignore[arg-type]
    assert rows["all mixed", "ε_mach alone"]["log-correlation"] > 0.8  # type: ignore[operator]


def test_leading_reports_both_procedures() -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(80, generator=rng).tolist()
    found = leading([look(i, "fp16", 1e-3 + noise[i], 1.0) for i in range(80)])
    assert {"published p", "p", "base rate", "lift"} <= set(found)


def test_the_recipe_is_the_papers_grid() -> None:
    full, quick = recipe("fragility"), recipe("fragility", quick=True)
    assert len(full.tasks) == 30
    assert {arm.train.precision for arm in quick.arms} == {"fp32", "bf16", "fp16"}
    assert full.arms[0].model.tokens == 65  # type: ignore[union-attr]
    assert isinstance(full.arms[0].train, TrainOptions)
