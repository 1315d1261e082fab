"""The trainer's loop is the loop one would write by hand, and says what it saw."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise.store import open_run
from equipoise_lab.data import Batch, Windows, from_bytes
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.options import from_mapping
from equipoise_lab.training import checkpoint, trainer
from equipoise_lab.training.options import (
    RateSchedule,
    TrainingProgress,
    TrainOptions,
    gradient_spikes,
    spike_score,
    spikes,
)
from equipoise_lab.training.trainer import Trainer

# No key bias: softmax ignores it, so Adam would blow up the rounding of its gradient.
CONFIG = GPTConfig(width=16, depth=2, heads=2, context=8, qkv_bias=False)
OPTIONS = TrainOptions(steps=12, batch=4, warmup=3, watch=False)


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(CONFIG, **changes))


def data(batch: int = 4) -> Windows:
    return Windows(from_bytes(bytes(range(256)) * 4), context=8, batch=batch)


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def by_hand(module: GPT, options: TrainOptions) -> list[float]:
    """The same training, spelled out: no trainer, no fused optimiser."""
    batches = data()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.95), weight_decay=options.weight_decay, foreach=False
    )
    losses = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.schedule.at(step)
        x, y = batches.take()
        loss = F.cross_entropy(module(x).view(-1, 256), y.view(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
        for parameter in module.parameters():
            parameter.grad.mul_(min(1.0, options.clip / (norm.item() + 1e-6)))
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_is_the_loop_one_would_write() -> None:
    ours, theirs = model(), model()
    result = Trainer(ours, data(), OPTIONS).run()
    assert result.losses == pytest.approx(by_hand(theirs, OPTIONS), rel=1e-4)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        # A fused and a plain Adam round differently, 12 times in a row.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_accumulation_is_a_larger_batch() -> None:
    """Two halves of a batch give its mean loss and its gradient."""

    class Halves:
        def __init__(self) -> None:
            self.whole, self.second = data(4), None

        def take(self) -> Batch:
            if self.second is not None:
                second, self.second = self.second, None
                return second
            x, y = self.whole.take()
            self.second = (x[2:], y[2:])
            return x[:2], y[:2]

        def state(self) -> dict[str, Any]:
            return self.whole.state()

        def restore(self, state: dict[str, Any]) -> None:
            self.whole.restore(state)

    whole = Trainer(model(), data(4), OPTIONS).run()
    halves = Trainer(model(), Halves(), replace(OPTIONS, accumulation=2)).run()
    assert halves.losses == pytest.approx(whole.losses, rel=1e-4)
    assert halves.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-3)
    assert halves.tokens == whole.tokens == 12 * 4 * 8


def test_the_tokens_of_every_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "share", lambda: SimpleNamespace(rank=0, world=3))
    result = Trainer(model(), data(), OPTIONS).run()
    assert result.tokens == 3 * 12 * 4 * 8


def test_the_first_loss_is_in_nats_per_token() -> None:
    result = Trainer(model(embedding_std=0.02), data(), OPTIONS).run()
    assert result.losses[0] == pytest.approx(math.log(256), rel=0.01)


def test_temperature_falls_to_one_while_training() -> None:
    seen: list[float] = []
    watched = model()

    first = watched.blocks[0].attention
    first.register_forward_hook(lambda m, args, out: seen.append(m.temperature))
    options = replace(OPTIONS, tau_start=4.0, tau_steps=6)
    Trainer(watched, data(), options).run()
    assert seen == [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, *[1.0] * 6]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_fp32_weights(precision: str) -> None:
    trained = model()
    options = replace(OPTIONS, precision=precision)  # type: ignore[arg-type]
    result = Trainer(trained, data(), options).run()
    reference = Trainer(model(), data(), OPTIONS).run()
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    # bf16 keeps 8 bits: a few parts in a hundred after 12 steps.
    assert result.losses == pytest.approx(reference.losses, rel=0.03)


def test_routers_are_balanced_but_not_in_the_reported_loss() -> None:
    losses = [
        Trainer(
            model(experts=4), data(), replace(OPTIONS, steps=3, balance_weight=w)
        ).run()
        for w in (0.0, 10.0)
    ]
    assert losses[0].losses[0] == losses[1].losses[0]
    assert losses[0].losses[2] != losses[1].losses[2]


def test_listener_hears_every_tenth_step_and_the_last() -> None:
    captured: list[TrainingProgress] = []
    Trainer(model(), data(), OPTIONS, listener=captured.append).run()
    assert [p.step for p in captured] == [10, 12] and captured[-1].steps == 12


def test_a_loss_that_is_not_finite_is_reported() -> None:
    captured: list[TrainingProgress] = []
    broken = model()
    with torch.no_grad():
        broken.token_embedding.weight.fill_(math.nan)
    result = Trainer(broken, data(), OPTIONS, listener=captured.append).run()
    assert math.isnan(result.loss) and captured[-1].warning == "the loss is not finite"
    assert result.spikes == 1 and result.gradient_spikes == 12


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint_every=4)
    first = Trainer(model(), data(), options, folder=tmp_path).run()
    again = Trainer(model(), data(), options, folder=tmp_path)
    assert again.step == 12 and again.run().losses == first.losses


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint_every=4)
    Trainer(model(), data(), options, folder=tmp_path).run()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match="is a checkpoint of another model: ") as said:
        Trainer(model(width=32), data(), options, folder=tmp_path)
    assert str(said.value).endswith("k_proj.weight is (16, 16) there and (32, 32) here")
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert before == after


def test_checkpoints_hold_no_pickle(tmp_path: Path) -> None:
    Trainer(
        model(), data(), replace(OPTIONS, checkpoint_every=4), folder=tmp_path
    ).run()
    newest = checkpoint.finished(tmp_path / "checkpoints")[-1]
    assert {p.name for p in newest.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "rank-0.json",
    }
    assert json.loads((newest / "state.json").read_text())["step"] == 12


def test_a_checkpoint_of_a_step_that_is_taken_again_is_replaced(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for turn in (1, 2):
        state = {"turn": turn}
        path = checkpoint.save(tmp_path, net, optimizer, step=4, state=state, mine={})
    assert checkpoint.finished(tmp_path) == [path]
    assert json.loads((path / "state.json").read_text()) == {"step": 4, "turn": 2}


def test_a_torn_draft_is_ignored(tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint_every=4)
    Trainer(model(), data(), options, folder=tmp_path).run()
    draft = tmp_path / "checkpoints" / ".draft-00000016"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert Trainer(model(), data(), options, folder=tmp_path).step == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"parallel": "tp"}, "ddp, fsdp"),
        ({"batch": 0}, "batch must be positive"),
        ({"weight_decay": -1.0}, "weight_decay cannot be negative"),
        ({"lr": 0.0}, "learning rate 0.0"),
        ({"warmup": 999}, "warm-up of 999 does not fit 150"),
        ({"steps": 0, "warmup": 0}, "steps must be positive"),
        ({"floor": 2.0}, "floor 2.0"),
        ({"tau_start": -1.0}, "temperature warm-up needs start > 0"),
        ({"learning_rate": 1.0}, "TrainOptions has no option 'learning_rate'"),
    ],
    ids=str,
)
def test_bad_options_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        from_mapping(TrainOptions, options)


def test_schedule_rises_then_falls() -> None:
    schedule = RateSchedule(peak=2.0, steps=100, warmup=10)
    rates = [schedule.at(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and max(rates) == rates[9] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert schedule.at(55) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert schedule.at(100) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0] * 100, 0),
        ([3.0 - 0.01 * t for t in range(100)], 0),
        ([3.0] * 60 + [3.05] + [3.0] * 10, 0),  # less than 0.1 nats
        ([3.0] * 60 + [4.0, 4.1, 4.0] + [3.0] * 10 + [4.0], 2),
        ([3.0] * 10 + [9.0] + [3.0] * 10, 0),  # too early to know
        ([3.0] * 60 + [math.nan] * 3, 1),
        ([], 0),
    ],
)
def test_spikes(losses: list[float], expected: int) -> None:
    assert spikes(losses) == expected


def test_spike_score_and_gradient_spikes() -> None:
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0)).tolist()
    assert spike_score(noise) == 0
    assert spike_score([*noise, 50.0]) == pytest.approx(1 / 501)
    assert math.isnan(spike_score([]))
    assert gradient_spikes([1.0, 5.0, 5.1, math.nan], clip=1.0) == 2


def test_steps_that_fp16_skips_are_counted_by_the_watch(tmp_path: Path) -> None:
    """A scale that overflows skips updates; trainer and run still count alike."""
    options = replace(
        OPTIONS, steps=6, precision="fp16", watch=True, every=2, preset="minimal"
    )
    one = Trainer(model(), data(), options, folder=tmp_path)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = weights(one.model)
    result = one.run()
    assert one.scaler.get_scale() < 2.0**40  # some steps were skipped
    run = open_run(tmp_path / "run.eqp")
    assert run.steps.tolist() == list(range(6)) and len(result.losses) == 6
    steps, losses = run.series("loss")[""]
    assert steps.tolist() == list(range(6))
    assert losses.tolist() == pytest.approx(result.losses, rel=1e-6)
    assert len(before) == len(weights(one.model))


def test_a_warning_reaches_the_progress_bar(tmp_path: Path) -> None:
    captured: list[TrainingProgress] = []
    lost = Trainer(
        model(),
        data(),
        replace(OPTIONS, steps=10, watch=True, every=5, preset="minimal"),
        folder=tmp_path,
        listener=captured.append,
    )
    with torch.no_grad():
        next(lost.model.parameters()).fill_(math.nan)
    lost.run()
    assert captured[-1].warning == "the loss is not finite"
    assert lost._watched is not None and lost._watched.findings
