"""Norms per module: known by hand, kept over a resume, blind to clipping."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise_lab.data import Windows, from_bytes
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.options import keyed
from equipoise_lab.results.measures import curve_measures, group_norms, steps_to
from equipoise_lab.running.execution import TrainedModel, execute
from equipoise_lab.running.experiment import Arm, Task
from equipoise_lab.studies.catalogue import measurements_of
from equipoise_lab.studies.rates import sharpness
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer, adamw

CONFIG = GPTConfig(width=16, depth=2, heads=2, context=8)
OPTIONS = TrainOptions(steps=8, batch=4, warmup=0, watch=False, parts_every=4)


def trainer(folder: Path | None = None, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    data = Windows(from_bytes(bytes(range(256)) * 4), context=8, batch=4)
    return Trainer(GPT(CONFIG), data, replace(OPTIONS, **changes), folder=folder)


def test_norms_are_those_of_the_parameters() -> None:
    one = trainer(steps=1, clip=1e-3)
    before = [p.detach().clone() for p in one.model.parameters()]
    result = one.run()
    parts = result.parts
    after = dict(one.model.named_parameters())
    old = dict(zip(after, before, strict=True))
    moved = {n: (after[n].detach() - old[n]).norm().item() for n in after}
    q = "blocks.1.attention.q_proj"
    size = math.hypot(moved[f"{q}.weight"], moved[f"{q}.bias"])
    assert parts["update"]["1.q"][0] == pytest.approx(size, rel=1e-5)
    # Before clipping: all of them together are the norm that clipping saw.
    total = math.hypot(*(v[0] for v in parts["gradient"].values()))
    assert total == pytest.approx(result.gradient_norms[0], rel=1e-5)
    assert total > 1e-2


def test_parts_continue_after_a_resume(tmp_path: Path) -> None:
    whole = trainer().run().parts
    trainer(tmp_path, steps=8, checkpoint_every=4).run()
    newest = tmp_path / "checkpoints" / "step-00000008"
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert trainer(tmp_path, checkpoint_every=4).run().parts == whole
    assert whole["steps"] == [0, 4]
    assert trainer(parts_every=0).run().parts == {}


def test_giving_up_on_a_run_that_is_lost() -> None:
    assert len(trainer(steps=40, give_up=100.0).run().losses) == 40
    assert len(trainer(steps=40, give_up=0.1).run().losses) == 10
    lost = trainer(steps=40, give_up=1e9)
    with torch.no_grad():
        next(lost.model.parameters()).fill_(math.nan)
    assert len(lost.run().losses) == 10


def test_what_curves_come_to() -> None:
    parts = {
        "steps": [0, 4, 8],
        "gradient": {"0.q": [3.0, 3.0, 9.0], "0.k": [4.0, 4.0, 0.0], "norm": [1.0] * 3},
        "update": {"0.q": [1.0] * 3, "0.k": [0.0] * 3},
    }
    assert group_norms(parts, "gradient", ("q", "k")).tolist() == [5.0, 5.0, 9.0]
    record = {
        "losses": [5.0] * 10 + [1.0] * 10,
        "gradient_norms": [7.0, 1.0],
        "parts": parts,
        "task": {"train": {"steps": 40}},
        "measures": {"theta_0_1": 0.5, "theta_0_9": 0.75, "sharp_0_9": 0.25, "S": 1.0},
    }
    found = curve_measures(record)
    assert found["steps_to_target"] == 16 and found["first_gradient"] == 7
    assert found["early_gradient_qk"] == 5 and found["early_update_qk"] == 1
    assert found["first_qk_start"] == 5 and found["first_qk"] == 9
    assert (found["theta_early"], found["theta_late"]) == (0.5, 0.75)
    assert found["sharp_rows"] == 0.25
    assert steps_to([], 1.0) == math.inf


def quadratic() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, depth=1, width=4, heads=1, vocabulary=8, context=4))
    optimizer = adamw(model, OPTIONS)
    x = torch.tensor([[1, 2, 3, 4]])
    for _ in range(3):
        model(x).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_preconditioned_sharpness_is_the_dense_one() -> None:
    """The oracle builds the Hessian row by row and solves the generalised problem."""
    model, optimizer = quadratic()
    batch = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])
    trained = TrainedModel(model=model, optimizer=optimizer, batch=batch)
    found = sharpness(trained)
    weights = list(model.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = torch.nn.functional.cross_entropy(model(batch[0])[0], batch[1][0])
        slope = torch.autograd.grad(loss, weights, create_graph=True)
        flat = torch.cat([g.flatten() for g in slope])
        rows = [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(one, weights, retain_graph=True)
                ]
            )
            for one in flat
        ]
    H = torch.stack(rows).double().numpy()
    # Cohen et al. 2022: momentum's bias correction is part of the step, hence of D.
    beta, steps = 0.95, 3
    D = np.concatenate(
        [
            ((optimizer.state[w]["exp_avg_sq"] / (1 - beta**steps)).sqrt() + 1e-8)
            .flatten()
            .numpy()
            for w in weights
        ]
    )
    top = np.linalg.eigvals(H / D[:, None]).real.max() / (1 - 0.9**steps)
    assert found["sharpness"] == pytest.approx(top, rel=0.03)


def test_an_unknown_measurement_is_one_line(tmp_path: Path) -> None:
    arm = Arm(name="a", model=CONFIG, train=OPTIONS, judges=("taste",))
    task = Task(arm=arm, seed=1)
    with pytest.raises(InputError, match="no measurement 'taste'; there are positions"):
        measurements_of([task])
    with pytest.raises(InputError, match="no measurement 'taste'; there are none"):
        execute(task, tmp_path)


def test_positions_see_short_rows(tmp_path: Path) -> None:
    arm = Arm(name="a", model=CONFIG, train=OPTIONS, judges=("positions",))
    task = Task(arm=arm, seed=1)
    found = execute(task, tmp_path, measurements=measurements_of([task]))
    assert found["theta_0_0"] == 0.0  # the first query sees one key
    assert 0 < found["theta_1_7"] <= 1 and found["sharp_0_0"] == 1.0
    assert "theta_2_0" not in found and found["theta_late"] != found["theta_late"]


def test_a_later_option_leaves_old_keys_alone() -> None:
    arm = Arm(name="a", model=CONFIG)
    assert "judges" not in keyed(arm) and "normaliser" in keyed(arm)
    asked = replace(arm, judges=("positions",))
    assert Task(arm=asked, seed=1).key != Task(arm=arm, seed=1).key
    back = Task.from_mapping(
        json.loads(json.dumps(Task(arm=asked, seed=1).to_mapping()))
    )
    assert back == Task(arm=asked, seed=1)
