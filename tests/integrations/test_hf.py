"""A real Trainer with and without the callback: same weights, and a run beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import equipoise
from equipoise.errors import InputError
from equipoise.integrations.hf import EquipoiseCallback
from tests.watching.models import Digest


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 40, (32, 12), generator=rng)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Remembering(TrainerCallback):  # type: ignore[misc]
    """Takes the fingerprint of a training at every step, as the Trainer goes."""

    def __init__(self) -> None:
        self.digest = Digest()

    def on_pre_optimizer_step(self, *args: Any, **given: Any) -> None:
        self.digest.gradients(given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.digest.end(given["model"], given["optimizer"].optimizer)
        self.history = [
            {k: v for k, v in entry.items() if "runtime" not in k and "second" not in k}
            for entry in state.log_history
        ]


def trained(
    where: Path,
    callbacks: list[Any],
    *,
    resume: str | None = None,
    steps: int = 6,
    **arguments_more: Any,
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(where), max_steps=steps, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3,
        save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        logging_steps=1, **arguments_more,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    data = Tokens()
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_cannot_tell_and_the_run_is_whole(tmp_path: Path) -> None:
    """Twenty steps: losses, evaluations, gradients, weights, optimiser state, RNG."""
    alone, watched = Remembering(), Remembering()
    path = tmp_path / "run.eqp"
    trained(tmp_path / "a", [alone], steps=20)
    ours = EquipoiseCallback(run=path, every=3, strict=True)
    trained(tmp_path / "b", [watched, ours], steps=20)
    assert alone.history == watched.history and len(alone.history) > 20
    assert alone.digest.parts() == watched.digest.parts()
    run = equipoise.open_run(path)
    steps, losses = run.series("loss")[""]
    assert list(steps) == list(range(20))
    assert all(2 < loss < 6 for loss in losses)  # two half losses: nats per token
    sampled, theta = run.series("attention.theta.p50")["transformer.h.0.attn"]
    assert list(sampled) == [*range(0, 20, 3)] and theta.shape == (7, 2)
    assert len(run.series("eval_loss")[""][0]) == 7  # and once at the end


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_trainer_keeps_the_phase(tmp_path: Path) -> None:
    first = EquipoiseCallback(run=tmp_path / "first.eqp", every=3)
    trained(tmp_path / "out", [first], steps=4)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    assert (checkpoint / "equipoise.json").is_file()
    second = EquipoiseCallback(run=tmp_path / "second.eqp", every=3)
    trained(tmp_path / "out", [second], resume=str(checkpoint), steps=8)
    run = equipoise.open_run(tmp_path / "second.eqp")
    assert list(run.series("loss")[""][0]) == [4, 5, 6, 7]
    assert list(run.series("gradient.norm")["transformer.h.0"][0]) == [6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["moved", "unwatched", "same run, last steps again"])
def test_a_resumed_run_has_the_trainers_step_numbers(how: str, tmp_path: Path) -> None:
    """Whichever checkpoint: each step once, none left out."""
    run = tmp_path / "run.eqp"
    ours = [] if how == "unwatched" else [EquipoiseCallback(run=run, every=3)]
    trained(tmp_path / "out", ours, steps=6)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    if how == "moved":
        (checkpoint / "equipoise.json").unlink()
        checkpoint = checkpoint.rename(tmp_path / "elsewhere")
    trained(
        tmp_path / "out",
        [EquipoiseCallback(run=run, every=3)],
        resume=str(checkpoint),
        steps=8,
    )
    steps, losses = equipoise.open_run(run).series("loss")[""]
    first = 4 if how == "unwatched" else 0
    assert list(steps) == [*range(first, 8)] and len(losses) == len(steps)
    sampled, _ = equipoise.open_run(run).series("attention.entropy")[
        "transformer.h.0.attn"
    ]
    assert list(sampled) == [s for s in range(first, 8) if s % 3 == 0]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_trainer_is_read_and_unchanged(tmp_path: Path) -> None:
    alone, watched = Remembering(), Remembering()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    torch._dynamo.reset()
    trained(tmp_path / "a", [alone], steps=4, **compiled)
    torch._dynamo.reset()
    run = tmp_path / "run.eqp"
    ours = EquipoiseCallback(run=run, every=2)
    trained(tmp_path / "b", [watched, ours], steps=4, **compiled)
    assert alone.digest.parts() == watched.digest.parts()
    reader = equipoise.open_run(run)
    assert list(reader.series("loss")[""][0]) == [*range(4)]
    entropy = reader.series("attention.entropy")
    assert {*entropy} == {"transformer.h.0.attn", "transformer.h.1.attn"}
    assert all(list(steps) == [0, 2] for steps, _ in entropy.values())
    assert not [f for f in reader.findings if f.severity != "info"]


def test_closing_twice_is_harmless() -> None:
    callback = EquipoiseCallback()
    callback.close()
    callback.close()


def test_a_misspelt_option_is_refused_before_the_training() -> None:
    EquipoiseCallback(run="a.eqp", name="a", every=3)
    with pytest.raises(InputError, match="evry.*nearest is every"):
        EquipoiseCallback(evry=3)
