"""What is read of an update is what moved the weights, whatever the optimiser."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.probes.capture import Collector
from equipoise.probes.updates import TOO_LARGE, Updates
from tests.probes.reading import gpt, tokens

Readings = dict[tuple[str, str], float]


def read(probe: Updates, model: nn.Module, optimizer: Any) -> Readings:
    """Take a step; return what the probe read of it."""
    emit = Collector()
    list(probe.attach(anatomy_of(model), emit, lambda hook: hook))
    optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens()).square().mean()
        loss.backward()
        return loss

    closure()
    probe.before_update(optimizer, emit)
    optimizer.step(closure)
    probe.on_update(optimizer, emit)
    table = emit.pop().items()
    return {(s, q): c.values[0] for q, cells in table for s, c in cells.items()}


OPTIMISERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    # β₂ is small, so that the largest v is not the last.
    "AMSGrad": lambda p: torch.optim.Adam(p, 1e-2, betas=(0.9, 0.1), amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_update_norm_is_the_distance_moved(name: str) -> None:
    model = gpt()
    optimizer = OPTIMISERS[name](model.parameters())
    probe = Updates()
    for _ in range(3):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        found = read(probe, model, optimizer)
    after = {n: p.detach() for n, p in model.named_parameters()}
    mine = [n for n in before if n.startswith("blocks.1.")]
    distance = sum((after[n] - before[n]).double().square().sum() for n in mine)
    size = sum(after[n].double().square().sum() for n in mine)
    # The distance is a difference of fp32 weights: ε·‖w‖/‖Δw‖ ≈ 1e-5 relative.
    norm, weight = found["blocks.1", "update.norm"], found["blocks.1", "weight.norm"]
    assert norm == pytest.approx(float(distance) ** 0.5, rel=1e-4)
    assert weight == pytest.approx(float(size) ** 0.5, rel=1e-5)
    assert not probe._before  # the copies are gone with the step


def test_a_large_models_blocks_take_turns_within_the_bound() -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    one = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    probe = Updates(copied=one)
    copied, seen = [], []
    for _ in range(4):
        emit, before = Collector(), probe.before_update

        def noting(optimizer: Any, emit: Any, before: Any = before) -> None:
            before(optimizer, emit)
            copied.append(sum(c.numel() * 4 for c in probe._before.values()))

        list(probe.attach(anatomy_of(model), emit, lambda hook: hook))
        model(tokens()).square().mean().backward()
        noting(optimizer, emit)
        optimizer.step()
        probe.on_update(optimizer, emit)
        seen.append({*emit.pop()["update.norm"]})
    assert all(0 < size <= one for size in copied)
    assert not any("blocks.0" in s and "blocks.1" in s for s in seen)
    assert {"blocks.0", "blocks.1"} <= set().union(*seen)
    assert any(a != b for a, b in zip(seen, seen[1:], strict=False))


def test_a_layer_larger_than_the_bound_is_named() -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    emit, probe = Collector(), Updates(copied=8)
    list(probe.attach(anatomy_of(model), emit, lambda hook: hook))
    model(tokens()).square().mean().backward()
    probe.before_update(optimizer, emit)
    optimizer.step()
    probe.on_update(optimizer, emit)
    assert not probe._before and TOO_LARGE in emit.gaps.partial["blocks.0"]


@pytest.mark.parametrize("name", ["AdamW", "AMSGrad"])
def test_the_update_of_a_complex_parameter_has_two_parts(name: str) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
    optimizer, emit = OPTIMISERS[name](model.parameters()), Collector()
    before = model.w.detach().clone()
    model.w.abs().square().sum().backward()
    probe = Updates()
    list(probe.attach(anatomy_of(model), emit, lambda hook: hook))
    optimizer.step()
    probe.on_update(optimizer, emit)
    moved = (model.w.detach() - before).norm().item()
    assert emit.pop()["update.norm"][""].values[0] == pytest.approx(moved, rel=1e-5)
