"""A real Lightning fit: attention is read although Lightning never calls the module."""

from pathlib import Path

import lightning
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import equipoise
from equipoise.errors import InputError
from equipoise.integrations.lightning import EquipoiseCallback, EquipoiseLogger
from tests.probes.reading import gpt
from tests.watching.models import Digest


class Module(lightning.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.model, self.fail_at, self.digest = gpt(), fail_at, Digest()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise RuntimeError("the subject died")
        (rows,) = batch
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.digest.loss(loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.digest.evaluation(self.model, batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.digest.gradients(self.model)

    def on_train_end(self) -> None:
        self.digest.end(self.model, self.trainer.optimizers[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(
    where: Path,
    *,
    callbacks: list[object],
    fail_at: int | None = None,
    kind: type["Module"] = Module,
    steps: int = -1,
    resume: Path | None = None,
) -> Module:
    torch.manual_seed(0)
    module = kind(fail_at)
    rng = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randint(0, 11, (80, 13), generator=rng))
    trainer = lightning.Trainer(
        max_epochs=1 if steps < 0 else 3, max_steps=steps, logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        default_root_dir=where, gradient_clip_val=1.0, val_check_interval=5,
    )  # fmt: skip
    trainer.fit(
        module,
        DataLoader(rows, batch_size=4),
        DataLoader(rows, batch_size=40),
        ckpt_path=resume,
    )
    trainer.save_checkpoint(where / "last.ckpt")
    return module


@pytest.mark.filterwarnings("ignore")
def test_lightning_training_is_unchanged_and_the_run_is_complete(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.eqp"
    alone = fitted(tmp_path, callbacks=[])
    callback = EquipoiseCallback(run=path, every=3, strict=True)
    watched = fitted(tmp_path, callbacks=[callback])
    assert alone.digest.parts() == watched.digest.parts()
    run = equipoise.open_run(path)
    assert list(run.series("loss")[""][0]) == list(range(20))
    sampled, theta = run.series("attention.theta.p50")["model.blocks.0.attention"]
    assert list(sampled) == [*range(0, 20, 3)] and theta.shape == (7, 2)


@pytest.mark.filterwarnings("ignore")
def test_an_exception_takes_the_instrument_off(tmp_path: Path) -> None:
    callback = EquipoiseCallback(run=tmp_path / "run.eqp", every=1)
    with pytest.raises(RuntimeError, match="the subject died"):
        fitted(tmp_path, callbacks=[callback], fail_at=3)
    assert callback.handle is None
    assert len(equipoise.open_run(tmp_path / "run.eqp").series("loss")[""][0]) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("watched", [True, False])
def test_a_resumed_fit_has_lightnings_step_numbers(
    watched: bool, tmp_path: Path
) -> None:
    """Also from a checkpoint that was written unwatched."""
    run = tmp_path / "run.eqp"
    ours = [EquipoiseCallback(run=run, every=3)] if watched else []
    fitted(tmp_path, callbacks=ours, steps=7)
    saved = (tmp_path / "last.ckpt").rename(tmp_path / "moved.ckpt")
    again = EquipoiseCallback(run=run, every=3)
    fitted(tmp_path, callbacks=[again], resume=saved, steps=12)
    steps, _ = equipoise.open_run(run).series("loss")[""]
    first = 0 if watched else 7
    assert list(steps) == [*range(first, 12)]
    sampled, _ = equipoise.open_run(run).series("attention.entropy")[
        "model.blocks.0.attention"
    ]
    assert list(sampled) == [s for s in range(first, 12) if s % 3 == 0]


class CalledByParts(Module):
    """A training step that calls embedding, blocks and head one by one."""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (rows,) = batch
        x = self.model.embedded(rows[:, :-1])
        for block in self.model.blocks:
            x = block(x)
        x = F.linear(self.model.final_norm(x), self.model.token_embedding.weight)
        loss = F.cross_entropy(x.flatten(0, 1), rows[:, 1:].flatten())
        self.digest.loss(loss)
        return loss


@pytest.mark.filterwarnings("ignore")
def test_a_training_step_that_calls_the_parts_is_read(tmp_path: Path) -> None:
    alone = fitted(tmp_path, callbacks=[], kind=CalledByParts, steps=4)
    run = tmp_path / "run.eqp"
    ours = EquipoiseCallback(run=run, every=2)
    watched = fitted(tmp_path, callbacks=[ours], kind=CalledByParts, steps=4)
    assert alone.digest.parts() == watched.digest.parts()
    theta = equipoise.open_run(run).series("attention.theta.p50")
    assert {*theta} == {f"model.blocks.{i}.attention" for i in (0, 1, 2)}


def test_a_misspelt_option_is_refused_before_the_training() -> None:
    EquipoiseCallback(run="a.eqp", name="a", every=3)
    with pytest.raises(InputError, match="evry.*nearest is every"):
        EquipoiseCallback(evry=3)


class TwoOptimizers(Module):
    """As Lightning has it: several optimisers are stepped by the module itself."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]


@pytest.mark.filterwarnings("ignore")
def test_a_step_ends_when_all_optimisers_have_stepped(tmp_path: Path) -> None:
    path = tmp_path / "run.eqp"
    trainer = lightning.Trainer(
        max_steps=10, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[EquipoiseCallback(run=path, every=2, strict=True)],
    )  # fmt: skip
    rows = TensorDataset(torch.randint(0, 11, (80, 13)))
    trainer.fit(TwoOptimizers(), DataLoader(rows, batch_size=4))
    run = equipoise.open_run(path)
    # Lightning counts the steps of all optimisers together: ten are five of each.
    assert list(run.series("loss")[""][0]) == [0, 1, 2, 3, 4]
    assert run.series("learning_rate")[""][1].tolist() == [0.1] * 5
    assert run.series("learning_rate.2")[""][1].tolist() == [0.001] * 5


class Logging(Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log_dict({"loss": loss, "mine": float(index)}, on_step=True)
        return loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [False, True], ids=["alone", "beside a callback"])
def test_a_logger_brings_the_callback_unless_one_is_there(
    given: bool, tmp_path: Path
) -> None:
    logger = EquipoiseLogger(run=tmp_path / "logger.eqp", every=2)
    own = EquipoiseCallback(run=tmp_path / "own.eqp", every=2)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=logger, callbacks=[own] if given else [],
        enable_checkpointing=False, enable_progress_bar=False, log_every_n_steps=1,
        enable_model_summary=False, default_root_dir=tmp_path, limit_val_batches=0,
    )  # fmt: skip
    rows = TensorDataset(torch.randint(0, 11, (16, 13)))
    trainer.fit(Logging(width=16), DataLoader(rows, batch_size=4))
    (path,) = tmp_path.glob("*.eqp")
    assert path.name == ("own.eqp" if given else "logger.eqp")
    run = equipoise.open_run(path)
    assert list(run.series("mine")[""][1]) == [0, 1, 2, 3]
    assert list(run.series("loss")[""][0]) == [0, 1, 2, 3]
    assert "logged.loss" in run.quantities and run.state == "finished"
    if not given:
        assert run.info.details["width"] == 16
