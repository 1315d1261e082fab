"""Baek's experiments run, and their summaries say what the numbers say."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise_lab.data import DataOptions
from equipoise_lab.results.publishing import publish
from equipoise_lab.studies.catalogue import finding, recipe
from equipoise_lab.studies.fragility import epsilon_control as control
from equipoise_lab.studies.fragility.measurement import (
    PREDICTORS,
    FragilityReading,
    byte_gpt,
    leading,
    readings,
    tiny_vit,
    tracking,
)
from equipoise_lab.studies.fragility.runner import FORMATS, Piece, Study
from equipoise_lab.training.options import TrainOptions

DIGITS = DataOptions(source="digits")


@pytest.mark.parametrize("kind", ["vit", "gpt"])
def test_readings_measure_and_predict(kind: str) -> None:
    subject = tiny_vit(8, DIGITS, batch=4) if kind == "vit" else byte_gpt(16, context=8)
    found = list(readings(subject, seed=0, steps=3, every=2, formats=("bf16", "fp16")))
    assert [(k.step, k.format) for k in found] == [
        (0, "bf16"),
        (0, "fp16"),
        (2, "bf16"),
        (2, "fp16"),
    ]
    assert all(0.4 < k.measured / k.ours < 2.5 for k in found)
    assert all(k.v1 > 10 * k.measured for k in found)


def look(step: int, format: str, measured: float, v1: float) -> FragilityReading:
    return FragilityReading(
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
    assert {predictor for _, predictor in rows} == set(PREDICTORS)
    # 10 is the geometric mean's distance between formats, 1e-2 against 1e-3.
    spread = rows["all mixed", "constant"]
    assert spread["p95"] / spread["p5"] > 10  # type: ignore[operator]


def test_leading_reports_both_procedures() -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(80, generator=rng).tolist()
    found = leading([look(i, "fp16", 1e-3 + noise[i], 1.0) for i in range(80)])
    assert {"published p", "p", "base rate", "lift"} <= set(found)


def test_training_in_three_precisions_is_a_recipe() -> None:
    full, quick = recipe("precision"), recipe("precision", quick=True)
    assert len(full.tasks) == 30
    assert {arm.train.precision for arm in quick.arms} == {"fp32", "bf16", "fp16"}
    assert full.arms[0].model.tokens == 65  # type: ignore[union-attr]
    assert isinstance(full.arms[0].train, TrainOptions)


def test_the_plan_covers_the_papers_grid() -> None:
    plan = Study(cifar10=Path("somewhere")).tasks
    kinds = {(p.kind, p.data, p.width) for p in plan if p.experiment == "tracking"}
    assert {
        ("vit", "cifar10", 96),
        ("vit", "digits", 128),
        ("gpt", "bytes", 96),
    } <= kinds
    assert sum(p.experiment == "control" for p in plan) >= 10
    assert {p.steps for p in plan if p.experiment == "leading"} == {195}
    assert Study().tasks[0].subject.built().config.tokens == 65  # type: ignore[union-attr]
    moved = replace(plan[-1], path="elsewhere")
    assert moved.result == plan[-1].result != replace(plan[-1], steps=3).result


def made_up(piece: Piece) -> list[dict[str, object]]:
    """Rows of the shape a piece leaves behind, without training anything."""
    if piece.experiment == "control":
        run = control.Controlled(
            policy="nothing",
            seed=piece.seed,
            actions=0,
            layer_steps=0,
            tail_loss=2.0 + piece.seed,
            final_mismatch=1e-3 * (1 + piece.seed),
            worst_mismatch=2e-3,
            onsets=1,
            replayed=math.nan,
        )
        others = [replace(run, policy="published rule"), replace(run, policy="BGSS")]
        others[1] = replace(others[1], tail_loss=2.1 + piece.seed, replayed=0.01)
        return [asdict(one) for one in (run, *others)]
    formats = FORMATS if piece.experiment == "tracking" else ("fp16",)
    rng = torch.Generator().manual_seed(piece.seed)
    noise = torch.rand(piece.steps, generator=rng).tolist()
    return [
        asdict(replace(look(step, name, 1e-3 + noise[step], 5.0), seed=piece.seed))
        for step in range(0, piece.steps, piece.every)
        for name in formats
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    study, root = Study(quick=True), tmp_path_factory.mktemp("fragility")
    for piece in study.tasks:
        record = {"piece": asdict(piece), "cpu_seconds": 3.0, "rows": made_up(piece)}
        (root / piece.result).write_text(json.dumps(record))
    return study, root


def test_evidence_becomes_a_page(finished: tuple[Study, Path], tmp_path: Path) -> None:
    study, root = finished
    evidence = study.evidence(root)
    assert evidence.about["command"] == "equipoise lab run fragility --quick"
    said = finding(evidence)
    assert [grid.title[:12] for grid in said.grids] == [
        "Experiment 1",
        "Experiment 2",
        "Experiment 3",
    ]
    for figure in said.figures:
        names = {line.name for line in figure.lines}
        assert {"ε_mach alone", "constant"} <= names, figure.name
    assert "published ε rule acted 0 times" in said.verdict
    assert "no policy lowered the loss" in said.verdict
    assert "and none the fp16 error" in said.verdict
    by_policy = {row[0]: row for row in said.grids[2].cells}
    steered = by_policy["BGSS"]
    assert steered[2] == "+0.1 in every pair" and steered[-1] == "+1.00%"
    assert publish(evidence, tmp_path).is_file()


def test_without_runs_there_is_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="control, leading, tracking"):
        Study(quick=True).evidence(tmp_path)


def test_a_study_runs_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Piece(experiment="tracking", kind="gpt", width=16, seed=0, steps=1)
    monkeypatch.setattr(Study, "tasks", [one])
    ended: list[str] = []
    for _ in range(2):
        failures = Study().run(
            tmp_path, workers=1, watcher=lambda job, news: ended.append(job.name)
        )
        assert failures == []
    assert ended == [one.name]  # what is finished is not made again
    assert json.loads((tmp_path / one.result).read_text())["rows"]


SMALL = byte_gpt(16, depth=2, context=8, batch=4)


def test_arms_share_start_and_data() -> None:
    """A policy that does nothing under another name is the same run, bit for bit."""
    runs = [
        control.controlled(SMALL, "a", policy, seed=3, steps=8)
        for policy in (control.nothing, lambda model, x, step: {})
    ]
    assert runs[0].tail_loss == runs[1].tail_loss
    assert runs[0].final_mismatch == runs[1].final_mismatch > 0
    assert runs[0].actions == 0 and math.isnan(runs[0].replayed)


def test_a_policy_that_acts_is_counted_and_replayed() -> None:
    run = control.controlled(SMALL, "s", control.static, seed=0, steps=8)
    assert run.actions == 5 and run.layer_steps == 40
    assert math.isfinite(run.replayed)


def test_bgss_waits_for_its_warm_up() -> None:
    acted: list[int] = []
    policy = control.by_bgss(SMALL, control.full_score)

    def noted(model: nn.Module, x: Tensor, step: int) -> dict[str, float]:
        moved = policy(model, x, step)
        acted.extend([step] * bool(moved))
        return moved

    control.controlled(SMALL, "BGSS", noted, seed=1, steps=60)
    assert acted and acted[0] >= 24


def test_rankings_differ_and_budget_does_not() -> None:
    torch.manual_seed(0)
    names = list(control.policies(SMALL, 0))
    assert names[0] == "nothing" and "random, same budget" in names
    model = SMALL.built()
    x, _ = SMALL.batches(0).take()
    paper = control.published_blocks(model, x, risks_only=True)
    assert control.full_score(paper) != control.risk_only(paper)
    assert control.at_random(0)(paper) == control.at_random(0)(paper)


def test_rules_see_what_enters_a_norm() -> None:
    model = SMALL.built()
    x, _ = SMALL.batches(0).take()
    states = control.norm_states(model, x)
    assert set(states) == set(control.epsilons(model))
    assert all(state.width == 16 for state in states.values())
    tiny = control.by_rule(lambda state, format: 1e-3)
    assert set(tiny(model, x, 0).values()) == {1e-3}
    assert tiny(model, x, 1) == {}
