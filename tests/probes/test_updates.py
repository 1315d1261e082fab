"""The update read from Adam's state is the one that moved the weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.discovery import anatomy_of
from equipoise.probes.updates import AdamUpdates
from tests.probes.reading import gpt, tokens


def moved(optimizer_class: Any, **options: Any) -> tuple[dict[Any, Tensor], Any, Any]:
    """Take three steps; return what the probe read of the third, before and after."""
    model = gpt()
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
    for _ in range(3):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()
    probe, found = AdamUpdates(), {}
    list(probe.attach(anatomy_of(model), lambda *a, **k: None, lambda h, **k: h))
    probe.on_update(optimizer, lambda s, q, v, **k: found.__setitem__((s, q), v))
    return found, before, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_update_norm_is_the_distance_moved(amsgrad: bool) -> None:
    found, before, after = moved(torch.optim.AdamW, weight_decay=0.0, amsgrad=amsgrad)
    mine = [n for n in before if n.startswith("blocks.1.")]
    distance = sum((after[n] - before[n]).double().square().sum() for n in mine)
    size = sum(after[n].double().square().sum() for n in mine)
    # The distance is a difference of fp32 weights: ε·‖w‖/‖Δw‖ ≈ 1e-5 relative.
    norm, weight = found["blocks.1", "update.norm"], found["blocks.1", "weight.norm"]
    assert norm.item() == pytest.approx(float(distance) ** 0.5, rel=1e-4)
    assert weight.item() == pytest.approx(float(size) ** 0.5, rel=1e-5)


def test_other_optimisers_have_no_reading() -> None:
    found, _, _ = moved(torch.optim.SGD)
    assert not found
