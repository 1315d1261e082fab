"""A sweep finishes what was left, repeats nothing, and leaves no orphans."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise.errors import InputError, MissingExtraError
from equipoise_lab.data import DataOptions
from equipoise_lab.models import GPTConfig, ViTConfig
from equipoise_lab.results.evidence import gather
from equipoise_lab.results.finding import results
from equipoise_lab.results.publishing import tables
from equipoise_lab.running.execution import build, execute, is_finished, outcome
from equipoise_lab.running.experiment import Arm, Experiment, Task
from equipoise_lab.running.runner import lab_directory, run_experiment
from equipoise_lab.running.workers import run_on_ray, standing
from equipoise_lab.studies.catalogue import RECIPES, REPORTS, finding, recipe
from equipoise_lab.training.options import TrainingProgress, TrainOptions
from tests.conftest import PATIENCE

TRAIN = TrainOptions(
    steps=20, batch=2, warmup=2, watch=False, checkpoint_every=5, every=5
)
TINY = GPTConfig(width=8, depth=1, heads=1, context=8)
ARMS = (
    Arm(name="pre", model=TINY, train=TRAIN),
    Arm(name="post", model=replace(TINY, residual="post"), train=TRAIN),
)
SWEEP = Experiment(name="sweep", question="?", arms=ARMS, seeds=(1, 2))
# Long enough to be killed half-way on any machine.
LENGTHY = replace(TRAIN, steps=800, checkpoint_every=50)
LONG = replace(SWEEP, arms=tuple(replace(arm, train=LENGTHY) for arm in ARMS))


def test_arms_share_seeds_and_data() -> None:
    tasks = SWEEP.tasks
    assert [(t.arm.name, t.seed) for t in tasks] == [
        ("pre", 1),
        ("post", 1),
        ("pre", 2),
        ("post", 2),
    ]
    assert all(t.arm.train.seed == t.seed for t in tasks)
    assert len({t.key for t in tasks}) == 4


def test_a_task_survives_json() -> None:
    vit = Arm(name="v", model=ViTConfig(), data=DataOptions(source="digits"))
    for task in (*SWEEP.tasks, Task(arm=vit, seed=3)):
        back = Task.from_mapping(json.loads(json.dumps(task.to_mapping())))
        assert back == task and back.key == task.key


def test_changed_options_are_another_run() -> None:
    task = SWEEP.tasks[0]
    other = replace(task, arm=replace(task.arm, train=replace(TRAIN, lr=2e-3, seed=1)))
    assert other.folder != task.folder


def test_a_finished_run_is_read_not_repeated(tmp_path: Path) -> None:
    task = SWEEP.tasks[0]
    first = execute(task, tmp_path)
    path = tmp_path / task.folder / "result.json"
    written = path.stat().st_mtime_ns
    assert execute(task, tmp_path) == first and path.stat().st_mtime_ns == written
    assert not (tmp_path / task.folder / "checkpoints").exists()
    assert {"loss", "validation", "spikes", "accuracy"} <= first.keys()


def test_an_arm_may_name_a_rival_of_softmax(tmp_path: Path) -> None:
    rival = replace(ARMS[0], normaliser="sparsemax")
    losses = [
        execute(Task(arm=arm, seed=1), tmp_path)["loss"] for arm in (ARMS[0], rival)
    ]
    assert losses[0] != losses[1]
    with pytest.raises(InputError, match="no normaliser 'maxsoft'; there are "):
        build(replace(rival, normaliser="maxsoft"), 1)


def test_images_run_too(tmp_path: Path) -> None:
    model = ViTConfig(image=8, channels=1, patch=4, width=8, depth=1, heads=1)
    arm = Arm(name="v", model=model, train=TRAIN, data=DataOptions(source="digits"))
    assert 0 <= execute(Task(arm=arm, seed=0), tmp_path)["accuracy"] <= 1


def test_a_failed_run_is_named_and_the_rest_continues(tmp_path: Path) -> None:
    news: list[TrainingProgress | None] = []
    for task in SWEEP.tasks[:3]:
        execute(task, tmp_path)  # and is not repeated
    missing = DataOptions(source="text", path=str(tmp_path / "none.txt"))
    bad = replace(ARMS[0], name="bad", data=missing)
    failures = run_experiment(
        replace(SWEEP, arms=(*ARMS, bad)),
        tmp_path,
        workers=3,
        watcher=lambda task, p: news.append(p),
    )
    assert [f.task.arm.name for f in failures] == ["bad", "bad"]
    assert "no file" in failures[0].reason and "log.txt" in failures[0].reason
    assert news.count(None) == 3
    assert max(p.step for p in news if p) == 20
    rows = results(SWEEP, tmp_path)
    assert [row.arm for row in rows] == ["pre", "post"]
    assert rows[0].against_first is None and rows[1].against_first is not None
    assert rows[1].against_first.n == 2 and rows[0].values["validation"].n == 2
    found = finding(gather(SWEEP, tmp_path))
    (shown,) = tables(SWEEP.question, found)
    assert shown.row_count == len(SWEEP.measures) + 1
    assert "post minus pre: " in found.verdict


def sweep(root: str) -> None:
    run_experiment(LONG, Path(root), workers=2)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def wait_until(holds: object, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, "took too long"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """A sweep killed after its first checkpoint, and its workers' ids."""
    process = multiprocessing.get_context("spawn").Process(
        target=sweep, args=(str(tmp_path),)
    )
    process.start()
    assert process.pid is not None
    wait_until(lambda: list(tmp_path.rglob("step-????????")))
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_until(lambda: not any(alive(pid) for pid in workers))
    yield tmp_path


def test_a_killed_sweep_leaves_no_processes_and_continues(killed: Path) -> None:
    assert not all(is_finished(killed / task.folder) for task in LONG.tasks)
    started = next(killed.rglob("step-????????")).parents[1]  # whole, not a draft
    task = next(t for t in LONG.tasks if (killed / t.folder) == started)
    captured: list[TrainingProgress] = []
    execute(task, killed, captured.append)
    assert captured[0].step > 50 and captured[-1].step == 800
    assert len(json.loads((started / "result.json").read_text())["losses"]) == 800


def test_ray_gives_the_same_numbers(tmp_path: Path) -> None:
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    try:
        short = replace(SWEEP, seeds=(1,))
        missing = DataOptions(source="text", path="none.txt")
        bad = replace(ARMS[0], name="bad", data=missing)
        ended: list[str] = []
        failures = run_experiment(
            replace(short, arms=(*ARMS, bad)),
            tmp_path,
            on="ray",
            watcher=lambda task, p: ended.append(task.arm.name),
        )
    finally:
        ray.shutdown()
    assert [f.task.arm.name for f in failures] == ["bad"]
    assert "no file none.txt" in failures[0].reason
    assert sorted(ended) == ["bad", "post", "pre"]
    for task in short.tasks:
        here = execute(task, tmp_path / "here")
        assert outcome(tmp_path / task.folder)["loss"] == here["loss"]


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"equipoise\[ray\]"):
        run_on_ray([], Path(), execute, watcher=lambda task, p: None)


def test_standing_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_LAB", str(tmp_path))
    assert lab_directory() == tmp_path
    assert len(standing(SWEEP.tasks, tmp_path).left) == 4
    with pytest.raises(InputError, match="no finished run"):
        results(SWEEP, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_sound_experiment(name: str, quick: bool) -> None:
    experiment = recipe(name, quick=quick)
    assert experiment.question and experiment.seeds
    assert quick or name not in REPORTS or len(experiment.seeds) >= 3
    assert len({task.folder for task in experiment.tasks}) == len(experiment.tasks)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: recipe("zzz"), "no experiment 'zzz'; there are prepost"),
        (lambda: replace(SWEEP, arms=()), "has no arm"),
        (lambda: replace(SWEEP, arms=(ARMS[0], ARMS[0])), "share a name"),
        (lambda: replace(SWEEP, seeds=()), "has no seed"),
    ],
)
def test_unsound_experiments_are_refused(make: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()  # type: ignore[operator]
