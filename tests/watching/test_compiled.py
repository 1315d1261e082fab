"""Compiled code stays as it was: no graph more, no break, no recompilation, no bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import equipoise
from tests.watching.models import (
    TinyModel,
    Trained,
    batches,
    declared,
    hooks_on,
    identical,
    objective,
    trained,
)


def wrapper(model: nn.Module, backend: str) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, backend=backend)
    return wrapped


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: Any, backend: str) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model  # type: ignore[no-any-return]


def blocks_in_place(model: Any, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model  # type: ignore[no-any-return]


def compilations() -> dict[str, int]:
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": counters["frames"]["total"],
    }


def compiled(
    wrap: Callable[..., nn.Module], backend: str, run: Path | None, steps: int
) -> tuple[Trained, dict[str, int]]:
    torch._dynamo.reset()
    counters.clear()
    make = partial(TinyModel, dropout=0.2, depth=1)
    memory, _ = trained(make, wrap=partial(wrap, backend=backend), run=run, steps=steps)
    return memory, compilations()


@pytest.mark.parametrize("wrap", [wrapper, in_place, blocks, blocks_in_place])
def test_aot_eager_is_untouched(wrap: Callable[..., nn.Module], tmp_path: Path) -> None:
    run = tmp_path / "a.eqp"
    alone, before = compiled(wrap, "aot_eager", None, 20)
    watched, after = compiled(wrap, "aot_eager", run, 20)
    assert identical(alone, watched)
    assert after == before
    steps, _ = equipoise.open_run(run).series("attention.max_logit")[
        "blocks.0.attention"
    ]
    assert list(steps) == [*range(0, 20, 3)]


@pytest.mark.needs("c++")
def test_inductor_with_dropout_is_untouched(tmp_path: Path) -> None:
    alone, before = compiled(wrapper, "inductor", None, 20)
    watched, after = compiled(wrapper, "inductor", tmp_path / "a.eqp", 20)
    assert identical(alone, watched)
    assert after == before


def test_the_probe_pass_sees_what_an_eager_model_shows(tmp_path: Path) -> None:
    """Dropout included: the micro-batch is run again with its own random numbers."""
    torch._dynamo.reset()
    make = partial(TinyModel, dropout=0.2, depth=1)
    trained(make, run=tmp_path / "eager.eqp", steps=4)
    compile_it = partial(wrapper, backend="aot_eager")
    trained(make, wrap=compile_it, run=tmp_path / "compiled.eqp", steps=4)
    eager, other = (
        equipoise.open_run(tmp_path / f"{name}.eqp") for name in ("eager", "compiled")
    )
    assert eager.quantities == other.quantities
    for quantity in ("attention.max_logit", "residual.B", "gradient.norm"):
        for site, (steps, values) in eager.series(quantity).items():
            again_steps, again = other.series(quantity)[site]
            assert list(steps) == list(again_steps)
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(again), rtol=1e-4, atol=1e-6
            )


REFUSED = {
    "forward function": "watch.silent.no_pass",
    "optimiser": "watch.silent.no_step",
    "wrapper beside the model": "watch.silent.no_pass",
}


@pytest.mark.parametrize(("what", "code"), REFUSED.items())
def test_what_cannot_be_read_is_named(what: str, code: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with declared():
        handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    called, step = partial(objective, model), optimizer.step
    if what == "forward function":
        called = torch.compile(called, backend="aot_eager")
    elif what == "wrapper beside the model":
        called = partial(objective, torch.compile(model, backend="aot_eager"))
    elif what == "optimiser":
        step = torch.compile(step, backend="aot_eager")

    def whole_step(batch: torch.Tensor) -> None:
        called(batch).backward()
        step()
        optimizer.zero_grad()

    for batch in batches(6):
        whole_step(batch)
    handle.close()
    found = [f for f in handle.findings if f.code == code]
    assert len(found) == 1
    assert found[0].step == 0 and hooks_on(model) == 0


@pytest.mark.parametrize("way", [partial, wrapper])
def test_a_compiled_caller_is_named_at_once_and_compiled_once(
    way: Any, tmp_path: Path
) -> None:
    """A model that only a guess knows: no error, and not one graph more."""
    seen = {}
    for run in (None, tmp_path / "a.eqp"):
        torch._dynamo.reset()
        counters.clear()
        model = TinyModel(depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        received: list[equipoise.Finding] = []
        if run is not None:
            handle = equipoise.watch(
                model, optimizer, run=run, every=2, on_finding=received.append
            )
        called = torch.compile(partial(objective, model), backend="aot_eager")
        if way is wrapper:
            called = partial(objective, wrapper(model, "aot_eager"))
        for batch in batches(5):
            called(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert run is None or len(received) == 1
        seen[run is None] = compilations()
    assert all(seen[True][kind] == seen[False][kind] for kind in ("graphs", "breaks"))
    assert (received[0].step, received[0].code) == (0, "watch.silent.no_pass")
    handle.close()
    assert hooks_on(model) == 0
    assert list(equipoise.open_run(handle.path).series("loss")[""][0]) == [*range(5)]


def test_a_compiled_evaluation_is_not_the_training(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)
    called = torch.compile(partial(objective, model), backend="aot_eager")
    for batch in batches(3):
        model.eval()
        called(batch)  # with gradients on, as some do
        model.train()
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    steps, _ = equipoise.open_run(handle.path).series("attention.max_logit")[
        "blocks.0.attention"
    ]
    assert list(steps) == [0, 1, 2] and not handle.findings


def test_a_whole_compiled_step_is_named_while_it_is_compiled(tmp_path: Path) -> None:
    """Forward, backward and update all inside the graph: nothing ever passes by."""
    torch._dynamo.reset()
    model = TinyModel(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    handle = equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1)

    @torch.compile(backend="aot_eager")
    def whole_step(batch: torch.Tensor) -> None:
        objective(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    received: list[int] = []
    for batch in batches(2):
        whole_step(batch)
        received.append(len(handle.findings))
    assert received == [1, 1], "at the first step, and once"
    handle.close()
    assert equipoise.open_run(handle.path).findings == list(handle.findings)
    (found,) = handle.findings
    assert (found.code, found.severity) == ("watch.silent.no_step", "error")
    assert hooks_on(model) == 0
