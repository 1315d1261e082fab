"""Weights in too few bits stay where they are; float32 weights move."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.probes.updates import UnchangedWeights
from tests.probes.reading import gpt, tokens


def to_bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers rounded to a significand of ``bits``."""
    significand, exponent = torch.frexp(x)
    return torch.ldexp((significand * 2.0**bits).round() / 2.0**bits, exponent)


def unchanged(bits: int | None, *, micro_batches: int = 1) -> dict[str, float]:
    """Train three steps with weights rounded after each; return the last reading."""
    model, probe, found = gpt(), UnchangedWeights(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in range(micro_batches):
            model(tokens()).square().mean().backward()
            probe.on_gradients(
                anatomy_of(model),
                lambda s, q, v, **k: found.__setitem__(s, v.item()),
                scale=None,
            )
        optimizer.step()
        probe.on_update(optimizer, lambda *a, **k: None)
        for parameter in model.parameters() if bits else ():
            parameter.data = to_bits(parameter.data, bits)
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_weights_in_few_bits_do_not_change(micro_batches: int) -> None:
    wide = unchanged(None, micro_batches=micro_batches)
    narrow = unchanged(4, micro_batches=micro_batches)
    assert {"blocks.0", "blocks.1"} <= set(wide) and max(wide.values()) < 0.01
    assert min(narrow.values()) > 0.5


def test_a_block_without_a_gradient_lost_no_update() -> None:
    model, probe, found = gpt(), UnchangedWeights(), {}
    for _ in range(2):
        (0 * model(tokens())).sum().backward()
        probe.on_gradients(
            anatomy_of(model),
            lambda s, q, v, **k: found.__setitem__(s, v.item()),
            scale=None,
        )
        probe.on_update(torch.optim.SGD(model.parameters()), lambda *a, **k: None)
    assert set(found.values()) == {0.0}


Groups = Callable[[nn.Module], list[dict[str, Any]]]


def norms(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 1]


def frozen_after_training(model: nn.Module) -> list[dict[str, Any]]:
    """Leave the gradients of an earlier training on what is frozen."""
    model(tokens()).square().mean().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return [{"params": norms(model)}]


def not_held(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": norms(model)}]


def held_without_a_rate(model: nn.Module) -> list[dict[str, Any]]:
    others = [p for p in model.parameters() if p.dim() != 1]
    return [{"params": norms(model)}, {"params": others, "lr": 0.0}]


@pytest.mark.parametrize(
    "groups", [frozen_after_training, not_held, held_without_a_rate]
)
def test_only_what_an_optimiser_moves_can_lose_updates(groups: Groups) -> None:
    model, probe, found = gpt(), UnchangedWeights(), list[tuple[str, float]]()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        probe.on_gradients(
            anatomy_of(model),
            lambda s, q, v, **k: found.append((s, v.item())),
            scale=None,
        )
        optimizer.step()
        probe.on_update(optimizer, lambda *a, **k: None)
    assert {"blocks.0", "blocks.1"} <= {site for site, _ in found}
    assert max(share for _, share in found) < 0.01


def test_a_weight_without_a_gradient_then_lost_no_update_by_now() -> None:
    """A map behind one that starts at zero has its first gradient a step later."""
    model, probe, found = gpt(), UnchangedWeights(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for factor in (0, 1):
        optimizer.zero_grad()
        (factor * model(tokens())).square().sum().backward()
        probe.on_gradients(
            anatomy_of(model),
            lambda s, q, v, **k: found.__setitem__(s, v.item()),
            scale=None,
        )
        optimizer.step()
        probe.on_update(optimizer, lambda *a, **k: None)
    assert set(found.values()) == {0.0}
