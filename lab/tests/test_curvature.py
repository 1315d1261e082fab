"""Measurements of loss differences and group Hessians, and their findings."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from equipoise.auditing.curvature import hessian
from equipoise.errors import InputError
from equipoise_lab.data import ImageBatches, digits
from equipoise_lab.models import ViT, ViTConfig
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.running.execution import TrainedModel
from equipoise_lab.studies import convergence, curvature
from equipoise_lab.studies.catalogue import MEASUREMENTS, recipe


@pytest.fixture
def trained(tmp_path: Path) -> TrainedModel:
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(image=8, patch=4, channels=1, width=8, depth=1, heads=1, ffn_width=8)
    )
    data = ImageBatches(digits(), batch=32, seed=0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        x, y = data.take()
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    return TrainedModel(
        model=model, optimizer=adam, batch=data.take(), seen=data, folder=tmp_path
    )


def test_slopes_are_those_of_running_means(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "ORDERS", 60)
    found = convergence.measure(trained)
    for place in ("null", "at", "sharp", "random"):
        assert found[f"slope_{place}"] == pytest.approx(-1, abs=0.06)
    for place in ("at", "sharp", "random"):
        assert found[f"variance_law_{place}"] == pytest.approx(1, abs=0.1)
    assert found["mean_loss_sharp"] > found["mean_loss_at"]
    shares = [found[f"share_{t}"] for t in ("value", "slope", "bend", "rest")]
    assert math.fsum(shares) == pytest.approx(1) and min(shares) >= 0
    assert found["ours_fails"] == 0 and found["ours_ratio"] >= 1
    assert found["delta2_ratio"] == pytest.approx(1, abs=0.2)  # 48 draws


def test_groups_hold_the_parameters_they_are_named_for(trained: TrainedModel) -> None:
    found = curvature.measure(trained)
    for name, patterns in {
        "FF": ["*.up_proj.*", "*.down_proj.*"],
        "LN2": ["*.feedforward_norm.*"],
        "V": ["*.v_proj.*"],
    }.items():
        block = hessian(trained.model, trained.batch, parameters=patterns)
        truth = float(torch.linalg.eigvalsh(block.dense()).abs().max())
        assert found[f"hessian_{name}"] == pytest.approx(
            truth, rel=2 * curvature.SEARCH.tolerance
        )
    up = dict(trained.model.named_parameters())["blocks.0.feedforward.up_proj.weight"]
    ff = hessian(trained.model, trained.batch, parameters=["*.up_proj.*"])
    assert curvature.largest_matrix(ff) == pytest.approx(
        float(torch.linalg.matrix_norm(up.detach(), 2))
    )


def test_entries_come_with_a_picture(trained: TrainedModel) -> None:
    found = curvature.entries(trained)
    block = hessian(trained.model, trained.batch, parameters=["*.q_proj.*"]).dense()
    truth = block.abs().clamp(min=1e-6).log10().mean()
    assert found["entries_Q_Q"] == pytest.approx(float(truth), abs=1e-3)
    assert len(found) == 28 and trained.folder is not None
    from PIL import Image

    with Image.open(trained.folder / "entries.png") as picture:
        assert picture.mode == "RGB" and picture.width == picture.height


def test_measurements_need_what_they_read(trained: TrainedModel) -> None:
    bare = TrainedModel(
        model=trained.model, optimizer=trained.optimizer, batch=trained.batch
    )
    with pytest.raises(InputError, match="trained on"):
        MEASUREMENTS["convergence"](bare)
    with pytest.raises(InputError, match="needs a folder"):
        MEASUREMENTS["entries"](bare)
    assert MEASUREMENTS["curvature"] is curvature.measure


def evidence(name: str, runs: dict[str, dict[int, dict[str, float]]]) -> Evidence:
    experiment = recipe(name)
    return Evidence(
        name=name,
        question=experiment.question,
        measures=experiment.measures,
        seeds=(1, 2),
        arms={arm: {} for arm in runs},
        baselines={},
        runs=runs,
    )


@pytest.mark.parametrize("data_helps", [True, False])
def test_the_verdict_on_scaling_follows_the_numbers(data_helps: bool) -> None:
    base = dict.fromkeys(recipe("convergence").measures, 1.0)
    gains = {"gpt-16-1x": 3.0, "gpt-16-4x": 2.0, "gpt-32-1x": 2.5, "gpt-32-4x": 1.9}
    if not data_helps:
        gains["gpt-32-1x"] = 1.5
    runs = {
        arm: {seed: {**base, "validation": loss + seed / 100} for seed in (1, 2)}
        for arm, loss in gains.items()
    }
    given = evidence("convergence", runs)
    ((data, model, apart),) = convergence.scaled(given).values()
    assert (data.mean, model.mean) == pytest.approx(
        (-1.0, -0.5 if data_helps else -1.5)
    )
    assert apart.mean == pytest.approx(0.5 if data_helps else -0.5)
    said = convergence.finding(given)
    assert ("does not hold here" in said.verdict) == data_helps
    assert said.figures[0].lines[0].y == pytest.approx([3.015, 2.015])


def test_the_ranking_follows_the_numbers() -> None:
    base = dict.fromkeys(recipe("curvature").measures, 1.0)
    last = {**base, "hessian_FF": 8.0, "hessian_LN2": 2.0, "hessian_V": 5.0}
    runs = {"vit-0": {1: base}, "vit-1000": {1: last}}
    said = curvature.finding(evidence("curvature", runs))
    assert "at the end: FF 8, V 5, LN2 2" in said.verdict
    assert "4 times that of the second norm" in said.verdict
    assert "3 of 7 groups grew" in said.verdict
    assert len(said.grids) == 3 and said.figures[0].name == "vit-hessian"
    assert "told from" not in said.verdict, "one seed tells nothing apart"


@pytest.mark.parametrize(
    ("near", "says"),
    [
        (
            (9.0, 6.0, 5.0),
            r"FF is told from all others but V \(\d+ seeds would show it",
        ),
        ((5.0, 5.1, 4.9), r"FF is told from all others \(ratios"),
    ],
)
def test_the_largest_is_told_from_others_by_seeds(
    near: tuple[float, ...], says: str
) -> None:
    base = dict.fromkeys(recipe("curvature").measures, 1.0)
    seeds = range(len(near))
    last = {
        s: {k: 1 + s / 100 for k in base}
        | {"hessian_FF": 8.0 + s / 100, "hessian_V": near[s]}
        for s in seeds
    }
    runs = {"vit-0": dict.fromkeys(seeds, base), "vit-1000": last}
    assert re.search(says, curvature.finding(evidence("curvature", runs)).verdict)
