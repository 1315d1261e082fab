"""Loops and calls nobody foresaw: the training goes on, and nothing of ours is lost."""

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import _get_current_function_mode_stack

import equipoise
from equipoise.cli import COMMANDS
from equipoise.errors import InputError
from equipoise.watching import Watch
from tests.watching.models import WIDTH, TinyBlock, TinyModel, batches, objective


def watched(model: nn.Module, path: Path, **options: Any) -> tuple[Any, Watch]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = path / "a.eqp"
    return optimizer, equipoise.watch(model, optimizer, run=run, every=1, **options)


class EvaluatesInThread(nn.Module):
    """In the middle of its forward pass, another thread evaluates the same model."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = TinyModel()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval()
        self.failures: list[BaseException] = []

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.trained(tokens)
        if torch.is_grad_enabled():
            thread = threading.Thread(target=self._evaluate, args=(tokens,))
            thread.start()
            thread.join()
        else:
            x = self.trained.embedding(tokens)
            self.inner(x, x, x)
        return out

    def _evaluate(self, tokens: Tensor) -> None:
        try:
            with torch.no_grad():
                self(tokens)
        except BaseException as failure:
            self.failures.append(failure)


def test_another_thread_evaluates_the_model_meanwhile(tmp_path: Path) -> None:
    model = EvaluatesInThread()
    optimizer, handle = watched(model, tmp_path, strict=True)
    for batch in batches(2):
        objective(model, batch).backward()
        optimizer.step()
    handle.close()
    assert not model.failures
    theta = equipoise.open_run(handle.path).series("attention.theta.p5")
    assert set(theta) == {f"trained.blocks.{i}.attention" for i in (0, 1)}


class SlowThread(nn.Module):
    """Another thread comes into the model while we are in it, and leaves after us."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inside, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._evaluate)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.thread.start()
            self.inside.wait(60)
        else:
            self.inside.set()
            self.over.wait(60)
        out: Tensor = self.inner(x)
        return out

    @torch.no_grad()
    def _evaluate(self) -> None:
        self(torch.ones(1, 2))


def test_a_thread_that_outlives_the_pass_holds_no_window_open(tmp_path: Path) -> None:
    model = SlowThread()
    _, handle = watched(model, tmp_path)
    model(torch.ones(1, 2))
    assert not _get_current_function_mode_stack()
    model.over.set()
    model.thread.join()
    handle.close()


def test_inside_torch_func_attention_is_named_as_unread(tmp_path: Path) -> None:
    model = TinyModel().eval()  # torch.func takes no statistics
    handle = equipoise.watch(model, run=tmp_path / "a.eqp", strict=True)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Any], batch: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (batch[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    torch.func.grad(loss)(weights, batches(1)[0])
    handle.step(loss=1.0)
    handle.close()
    (found,) = handle.findings
    assert found.code == "watch.unread.torch_func"


class AnyBatch(nn.Module):
    """Attention that bears a batch of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2))
        out: Tensor = x + self.proj(y.transpose(1, 2).flatten(2))
        return out


def test_a_batch_without_rows_costs_no_probe(tmp_path: Path) -> None:
    model = nn.Sequential(AnyBatch(), AnyBatch())
    optimizer, handle = watched(model, tmp_path, preset="deep")
    x = torch.randn(2, 5, WIDTH)
    for batch in (x[:0], x):
        model(batch).pow(2).sum().backward()
        optimizer.step()
    handle.close()
    (found,) = handle.findings
    assert found.code == "watch.unread.no_norms"
    theta = equipoise.open_run(handle.path).series("attention.theta.p5")
    assert list(theta["0"][0]) == [1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda m: ([m], None), "list.*torch.nn.Module"),
        (lambda m: (m, m.parameters()), "not a torch.optim.Optimizer.*step"),
        (lambda m: (nn.Sequential(m, nn.LazyLinear(2)), None), "lazy.*one batch"),
    ],
)
def test_what_is_no_model_and_no_optimiser(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        equipoise.watch(*given(TinyModel()))


class DeepSpeedEngine(nn.Module):
    __module__ = "deepspeed.runtime.engine"


class DeepSpeedZeroOptimizer:
    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class AcceleratesOptimizer:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def partitioned() -> nn.Module:
    model = TinyModel()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("which", ["engine", "optimiser", "wrapped", "ZeRO-3"])
def test_deepspeed_is_refused_by_name(which: str) -> None:
    model: nn.Module = TinyModel()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = None
    if which == "engine":
        model = DeepSpeedEngine()
    elif which == "ZeRO-3":
        model = partitioned()
    else:
        optimizer = DeepSpeedZeroOptimizer(plain)
    if which == "wrapped":
        optimizer = AcceleratesOptimizer(optimizer)
    words = "ZeRO-3.*FSDP" if which == "ZeRO-3" else "DeepSpeed.*engine.module.*step"
    with pytest.raises(InputError, match=words):
        equipoise.watch(model, optimizer)


@pytest.mark.parametrize(
    "option", [{"every": "ten"}, {"every": True}, {"at": 3}, {"budget": "2 %"}]
)
def test_an_option_of_another_kind_is_refused_by_name(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InputError, match=f"{name}="):
        equipoise.watch(TinyModel(), **option)


def test_an_optimiser_of_another_model_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = torch.optim.SGD(TinyModel().parameters(), lr=0.1)
    equipoise.watch(TinyModel(), stranger, run=tmp_path / "a.eqp").close()
    assert "another model's" in caplog.text


def test_the_optimiser_inside_accelerates_is_read(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp") as handle:
        for batch in batches(3):
            accelerator.backward(objective(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert list(equipoise.open_run(handle.path).steps) == [0, 1, 2]


def test_the_first_line_names_commands_that_exist(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "equipoise"):
        equipoise.watch(nn.Linear(2, 2), run=tmp_path / "a.eqp").close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "only its calls will show" in first and "0 steps watched" in last
    named = re.findall(r"equipoise (\w+) \S+\.eqp", f"{first} {last}")
    assert len(named) == 2 and {*named} <= {*COMMANDS}


def parametrised(model: TinyModel) -> None:
    """Weights that move, or draw random numbers, whenever they are asked for."""
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.attention.q_proj)
    register_parametrization(model.blocks[0].norm_1, "weight", nn.Dropout(0.5))


@pytest.mark.parametrize("when", [0, 2])
def test_parametrised_weights_are_not_asked_for(when: int, tmp_path: Path) -> None:
    """Before watching begins, and while it runs; the second is found by itself."""
    ended = []
    for path in (None, tmp_path):
        torch.manual_seed(0)
        model = TinyModel()
        if when == 0:
            parametrised(model)
        handle = None if path is None else watched(model, path)[1]
        for number, batch in enumerate(batches(4)):
            if number and number == when:
                parametrised(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended.append([*model.state_dict().values(), torch.get_rng_state()])
    assert handle is not None
    handle.close()
    for plain, mine in zip(*ended, strict=True):
        assert torch.equal(plain, mine)
    codes = ("watch.unread.norm_parametrised", "watch.unread.projections_unknown")
    unread = {f.site for f in handle.findings if f.code in codes}
    assert unread == {"blocks.0.attention", "blocks.0.norm_1"}


def test_modules_that_are_replaced_and_added_have_their_names(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer, handle = watched(model, tmp_path)
    for number, batch in enumerate(batches(4)):
        if number == 2:
            model.blocks[0] = TinyBlock()
            model.blocks.append(TinyBlock())
            optimizer.add_param_group({"params": [*model.blocks[2].parameters()]})
            optimizer.add_param_group({"params": [*model.blocks[0].parameters()]})
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    run, added = equipoise.open_run(handle.path), "blocks.2"
    for quantity, inside in {
        "attention.entropy": ".attention",
        "projection.G": ".attention",
        "residual.B": "",
        "gradient.norm": "",
        "update.norm": "",
    }.items():
        steps = {site: list(s) for site, (s, _) in run.series(quantity).items()}
        assert steps["blocks.0" + inside] == [0, 1, 2, 3]
        assert steps[added + inside] == [2, 3]
    assert [f.code for f in handle.findings] == ["watch.modules"]
