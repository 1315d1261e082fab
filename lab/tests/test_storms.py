"""The benchmark of instability: its plan, its labels by the loss alone, its scores."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from equipoise.errors import InputError
from equipoise_lab.commands import storms as command
from equipoise_lab.data import Batch
from equipoise_lab.models import GPT
from equipoise_lab.storms import families, plan
from equipoise_lab.storms.baselines import BASELINES
from equipoise_lab.storms.labels import Label, counts, labels, onset, outcome
from equipoise_lab.storms.plan import CONTROLS, FAMILIES, NORMAL, Storm
from equipoise_lab.storms.runs import make
from equipoise_lab.storms.scoring import (
    Alarm,
    Score,
    ScoredTrial,
    at_level,
    crossings,
    episodes,
    loaded,
    matched,
    poisson_bound,
    score,
    steps_of,
)
from equipoise_lab.storms.tables import label_table, score_table

FAULT = Storm(role="fault", family="learning rate", severity=0.9, seed=1, steps=12)


def test_the_plan_has_the_sizes_of_the_benchmark() -> None:
    tasks = plan.plan(NORMAL)
    faults = [s for s in tasks if s.role == "fault" and s.tier == "small"]
    for family in FAMILIES:
        severities = [s.severity for s in faults if s.family == family]
        assert sum(s <= 0.4 for s in severities) == 8
        assert sum(s >= 0.6 for s in severities) == 8
        assert len(set(severities)) == 16  # spread, not two settings
    controls = [s for s in tasks if s.role == "control"]
    assert len(controls) == 80 and {s.steps for s in controls} == {500}
    deep = [s for s in tasks if s.role == "fault" and s.tier == "deep"]
    assert len(deep) == 32 and {s.steps for s in deep} == {300}
    assert {s.result for s in tasks}.__len__() == len(tasks)
    assert all(plan.reference_of(s) in tasks for s in faults + deep)
    # A longer benchmark keeps what a shorter one has made.
    assert set(tasks) <= set(plan.plan(plan.FULL))
    at = {storm: place for place, storm in enumerate(tasks)}
    assert all(at[plan.reference_of(s)] < at[s] for s in faults + deep)


def test_cut_short_every_family_has_as_many_runs() -> None:
    tasks = [s for s in plan.plan(NORMAL) if s.role == "fault" and s.tier == "small"]
    first = tasks[: 2 * len(FAMILIES)]
    assert {s.family for s in first} == set(FAMILIES) and {s.seed for s in first} == {1}


@pytest.mark.parametrize("by", ["seed", "family"])
def test_folds_share_a_seed_or_a_family(by: str) -> None:
    groups = plan.folds(plan.plan(NORMAL), by)  # type: ignore[arg-type]
    assert all(len({getattr(s, by) for s in group}) == 1 for group in groups)
    assert sum(map(len, groups)) == len(plan.plan(NORMAL))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_severer_fault_is_another_run(family: str) -> None:
    """Severity moves a setting of every family, for odd and for even seeds."""
    for seed in (1, 2):
        storm = replace(FAULT, family=family, seed=seed, severity=0.1, steps=60)
        mild, severe = (trained_state(s) for s in (storm, replace(storm, severity=0.9)))
        assert not all(torch.equal(a, b) for a, b in zip(mild, severe, strict=True))


def trained_state(storm: Storm) -> list[torch.Tensor]:
    """Return what the change makes of weights, options and batches, untrained."""
    change = families.change_of(storm)
    torch.manual_seed(0)
    model = GPT(replace(families.shape_of(storm), **change.model))
    change.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    stand_in = type("At", (), {})()
    stand_in.model, stand_in.optimizer, stand_in.step = model, optimizer, 50
    change.before_step(stand_in)
    group = optimizer.param_groups[0]
    options = families.TRAIN.__class__(**{**asdict(families.TRAIN), **change.train})
    settings = [group["lr"], group["eps"], options.lr, options.balance_weight]
    batches = change.batches(Counting())
    targets = [batches.take()[1] for _ in range(60)]
    return [
        torch.tensor([*settings, *options.betas]),
        torch.cat([p.detach().flatten() for p in model.parameters()]),
        torch.stack(targets),
    ]


class Counting:
    """Batches of ones."""

    def take(self) -> Batch:
        return torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)

    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass


def test_stored_bits_are_the_nearest() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=rng)
    # An oracle that shares no formula: torch's own bf16 has 8 bits of significand.
    assert torch.equal(families.to_bits(x, 8), x.bfloat16().float())


def test_an_altered_stream_resumes_where_it_was() -> None:
    storm = replace(FAULT, family="corrupted data", steps=8)
    one = families.change_of(storm).batches(Counting())
    for _ in range(5):
        one.take()
    again = families.change_of(storm).batches(Counting())
    again.restore(one.state())
    assert torch.equal(one.take()[1], again.take()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("storms")
    control = Storm(role="control", family="restart", severity=0.0, seed=1, steps=12)
    for storm in (plan.reference_of(FAULT), FAULT, control):
        make(storm, root)
    return root


def test_runs_are_recorded_and_labelled(runs: Path) -> None:
    found = {label.storm.role: label for label in labels(runs)}
    assert found["control"].outcome == found["reference"].outcome == "survived"
    fault = found["fault"]
    assert fault.healthy == found["reference"].validation and fault.steps == 12
    assert fault.outcome == outcome(fault.validation, fault.healthy)
    steps = dict(steps_of(fault.folder / "run.eqp"))
    assert sorted(steps) == list(range(12))
    assert "attention.theta.p5" in steps[5] and "attention.theta.p5" not in steps[6]
    assert steps[5].records[0].sites and steps[5].details["blocks"]
    assert "storm" not in json.dumps(steps[5].details)  # the answer is not given away
    record = json.loads((fault.folder / "result.json").read_text())
    assert [float(r["loss"][0]) for r in steps.values()] == record["losses"]


def test_a_fault_without_its_matched_run_has_no_label(
    runs: Path, tmp_path: Path
) -> None:
    alone = tmp_path / FAULT.folder
    alone.mkdir(parents=True)
    (alone / "result.json").write_text((runs / FAULT.result).read_text())
    assert labels(tmp_path) == []
    with pytest.raises(InputError, match="equipoise lab run storms"):
        labels(tmp_path / "empty")


def test_onset_is_where_the_loss_leaves_the_band_for_good() -> None:
    healthy = [3.1 - 0.01 * t for t in range(100)]
    spike = healthy[:40] + [9.0] + healthy[41:]
    assert onset(spike, healthy) is None  # it came back
    stuck = healthy[:60] + [healthy[60]] * 40
    found = onset(stuck, healthy)
    assert found is not None and 60 < found < 80
    assert onset([*stuck[:90], math.nan], healthy) is not None
    assert onset([8.0] * 100, healthy) == 0


def label(
    kind: str, *, start: int | None = None, steps: int = 400, **more: int
) -> Label:
    return Label(
        storm=replace(FAULT, seed=more.pop("seed", 1)),
        folder=Path(),
        outcome=kind,  # type: ignore[arg-type]
        validation=2.0,
        healthy=2.0,
        onset=start,
        steps=steps,
        **more,
    )


@pytest.mark.parametrize(
    ("given", "alarms", "hit", "lead", "false"),
    [
        (label("failed", start=300), [150], 150, 150, 0),
        (label("failed", start=300), [310], None, 0, 0),  # late
        (label("failed", start=300), [50, 200], 200, 100, 1),  # early, then in time
        (label("failed", start=300, injected=250), [200, 260], 260, 40, 1),
        (label("failed", start=20), [10], None, 0, 0),  # too early to be foreseen
        (label("survived"), [50, 200], None, 0, 2),
    ],
)
def test_alarms_are_hits_late_or_false(
    given: Label, alarms: list[int], hit: int | None, lead: int, false: int
) -> None:
    one = ScoredTrial(label=given, alarms=tuple(alarms))
    assert (one.hit, one.lead, one.false_alarms) == (hit, lead, false)


def test_alarms_within_a_hundred_steps_count_once() -> None:
    steps = [(step, {"loss": np.ones(1)}) for step in range(300)]
    assert episodes(lambda step, readings: step >= 120, steps) == (120, 220)
    assert episodes(lambda step, readings: False, steps) == ()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 60])
def test_the_poisson_bound_is_exact(count: int) -> None:
    truth = stats.chi2.ppf(0.95, 2 * (count + 1)) / 2
    assert poisson_bound(count) == pytest.approx(truth, rel=1e-9)


def test_a_score_sums_its_trials() -> None:
    trials = (
        ScoredTrial(label=label("failed", start=300), alarms=(200,)),
        ScoredTrial(label=label("failed", start=300), alarms=()),
        ScoredTrial(label=label("survived", steps=5000), alarms=(7,)),
        ScoredTrial(label=label("survived", steps=5000), alarms=()),
    )
    found = Score(trials=trials)
    assert found.recall == 0.5 and found.median_lead == 50
    assert found.rate == 1.0 and found.rate_bound == pytest.approx(4.744, abs=1e-3)
    low, high = found.recall_interval()
    assert (low, high) == pytest.approx((0.0126, 0.9874), abs=1e-4)


def test_a_forecaster_is_tuned_without_the_seed_it_is_scored_on(runs: Path) -> None:
    found = labels(runs)
    other = [replace(found[0], storm=replace(found[0].storm, seed=2))]
    seen: list[set[int]] = []

    def maker(training: Sequence[Label]) -> Alarm:
        seen.append({one.storm.seed for one in training})
        return lambda step, readings: step == 3

    result = score(maker, [*found, *other])
    assert seen.count({2}) == sum(one.outcome != "between" for one in found)
    assert {1} in seen and all(t.alarms == (3,) for t in result.trials)


def noisy(at: float, *, length: int = 200, jump: int = 150) -> list[tuple[int, object]]:
    rng = np.random.default_rng(0)
    steps = []
    for step in range(length):
        level = at if step >= jump else 1.0
        noise = 0.01 * rng.standard_normal(3)
        readings = {
            "loss": [2.0 * level + noise[0]],
            "gradient.norm.total": [level + noise[1]],
            "output.logit_norm": [level + noise[2]],
            "attention.max_logit": [3.0, 30.0 * level],
            "precision.kappa_softmax": [30.0 * level, 2.0],
            "residual.kurtosis": [3.0 * level + noise[2], 1.0],
            "update.norm": [0.1 * level],
        }
        steps.append((step, {q: np.array(v) for q, v in readings.items()}))
    return steps


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_see_a_jump_and_no_noise(name: str) -> None:
    quiet, loud = (episodes(BASELINES[name](), noisy(at)) for at in (1.0, 50.0))  # type: ignore[arg-type]
    if name.startswith("always"):
        assert quiet == loud == (100,)
    elif "ZClip" in name or "W&B" in name:  # 2.5 σ and 3 σ: some quiet steps are above
        assert len(quiet) in (1, 2) and loud[0] == quiet[0]
    else:
        # KillLossSpike asks for five in a row; the others answer at once.
        assert quiet == () and loud[0] == (154 if name == "KillLossSpike" else 150)


def test_a_matched_threshold_is_the_lowest_that_is_quiet_enough() -> None:
    """Two stable runs of three, and a failure with a course of its own."""
    courses = [
        (label("survived"), [(0, 1.0), (150, 5.0), (300, 2.0)]),
        (label("survived"), [(0, 1.0), (150, 3.0)]),
        (label("failed", start=300), [(0, 0.0), (250, 4.0)]),
    ]
    for allowed, threshold, recall in ((0, math.inf, 0.0), (1, 4.0, 1.0)):
        assert matched(courses, allowed) == threshold
        found = at_level(courses, threshold)
        assert found.false_alarms == allowed and found.recall == recall
    assert crossings([(0, 2.0), (50, 2.0), (120, 2.0), (130, 1.0)], 2.0) == (0, 120)


def test_zclip_does_not_learn_from_what_it_clips() -> None:
    """After a clipped jump its mean has moved by 2.5 σ of the old spread at most."""
    alarm = BASELINES["gradient z-score (ZClip)"]()
    answers = [bool(alarm(step, readings)) for step, readings in noisy(50.0)]  # type: ignore[arg-type]
    assert all(answers[150:160])


def test_a_forecaster_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_storms.py").write_text(
        "def f():\n    return lambda s, r: True\nx = 1\n"
    )
    assert loaded("mine_storms:f")()(0, {})
    for spec, says in (
        ("mine_storms", "names no forecaster"),
        ("mine_storms:g", "has no 'g'"),
        ("mine_storms:x", "is no function"),
        ("not_there:f", "no module 'not_there'"),
    ):
        with pytest.raises(InputError, match=says):
            loaded(spec)


def test_tables_and_commands_show_the_benchmark(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = labels(runs)
    assert label_table(found).row_count == len(counts(found))
    assert score_table({"a": score(BASELINES["Megatron"], found)}).row_count == 1
    shown = CliRunner().invoke(command.app, ["labels", "--runs", str(runs)])
    assert shown.exit_code == 0 and "small: learning rate" in shown.stdout
    scored = CliRunner().invoke(command.app, ["score", "--runs", str(runs)])
    assert scored.exit_code == 0 and "Megatron" in scored.stdout


@pytest.mark.parametrize("kind", CONTROLS)
def test_every_control_trains(kind: str) -> None:
    """Each control changes a run without stopping it: a few steps of its own loop."""
    from equipoise_lab.data import DataOptions, open_data
    from equipoise_lab.training.trainer import Trainer

    storm = Storm(role="control", family=kind, severity=0.0, seed=1, steps=6)
    change = families.change_of(storm)
    torch.manual_seed(0)
    model = GPT(replace(families.shape_of(storm), **change.model))
    change.prepare(model)
    options = replace(families.TRAIN, steps=6, warmup=0, watch=False)
    options = replace(options, **change.train)
    data = open_data(DataOptions(), batch=options.batch, seed=1, context=32)
    trainer = Trainer(
        model, change.batches(data.train), options, before_step=change.before_step
    )
    assert all(math.isfinite(loss) for loss in trainer.run().losses)
