"""A run of the lab can be looked at again: by its folder or by a checkpoint."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch

from equipoise.errors import InputError
from equipoise.store import open_run
from equipoise_lab.commands.subject import is_run
from equipoise_lab.data import open_data
from equipoise_lab.models import GPTConfig
from equipoise_lab.running.execution import build, reopened, task_of
from equipoise_lab.running.experiment import Arm, Task
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("run")
    train = TrainOptions(
        steps=2, batch=2, warmup=0, checkpoint_every=1, preset="minimal"
    )
    arm = Arm(
        name="a", model=GPTConfig(width=8, depth=1, heads=1, context=8), train=train
    )
    task = Task(arm=arm, seed=42)
    data = open_data(arm.data, batch=2, seed=42, context=8).train
    trainer = Trainer(
        build(arm, 42), data, train, folder=folder, info={"task": task.to_mapping()}
    )
    trainer.run()
    return folder, trainer.model


def test_the_newest_checkpoint_is_the_trained_model(
    run: tuple[Path, torch.nn.Module],
) -> None:
    folder, trained = run
    assert is_run(folder)
    model, (x, _) = reopened(folder)
    assert torch.equal(model(x), trained(x))
    first, last = sorted((folder / "checkpoints").iterdir())
    assert is_run(first)
    assert torch.equal(reopened(last)[0](x), trained(x))
    assert not torch.equal(reopened(first)[0](x), trained(x))


def test_a_folder_that_cannot_be_reopened_gives_the_reason(
    run: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder, _ = run
    assert not is_run(tmp_path)
    (tmp_path / "run.eqp").write_bytes((folder / "run.eqp").read_bytes())
    with pytest.raises(InputError, match="has no checkpoint"):
        reopened(tmp_path)
    lonely = tmp_path / "a" / "b" / "step-00000001"
    lonely.mkdir(parents=True)
    (lonely / "state.json").write_text("{}")
    with pytest.raises(InputError, match="is no run with weights"):
        reopened(lonely)


BEFORE = Path(__file__).parent / "data" / "before"
"""A run and its checkpoint as dc3c61d wrote them, before the tree was redrawn."""
LOGITS = (-0.0062132953, 0.5392295122, -0.0837141424, -0.0402549617)
"""Of the last token, as that revision computed them."""


def test_a_checkpoint_written_before_the_tree_was_redrawn_opens() -> None:
    model, (x, _) = reopened(BEFORE)
    assert x.shape[1] == 8
    logits = model(31 * torch.arange(8)[None])[0, -1, :4]
    torch.testing.assert_close(logits, torch.tensor(LOGITS), rtol=1e-4, atol=1e-5)


def test_a_training_written_before_the_tree_was_redrawn_is_resumed(
    tmp_path: Path,
) -> None:
    place = copytree(BEFORE, tmp_path / "run")
    task = task_of(place / "checkpoints" / "step-00000002")
    train = replace(task.arm.train, steps=3)
    data = open_data(task.arm.data, batch=2, seed=42, context=8).train
    trainer = Trainer(build(task.arm, 42), data, train, folder=place)
    trainer.run()
    assert len(open_run(place / "run.eqp").series("loss")[""][0]) == 3
