"""Gradient norms and backward factors against autograd, asked directly."""

import pytest
import torch
from torch import Tensor, nn

from equipoise.probes.backward import BackwardFactors
from equipoise.probes.gradients import GradientNorms
from tests.probes.reading import gpt, measured, tokens


def test_gradient_norms_are_those_of_the_blocks() -> None:
    model = gpt()
    found = measured(model, [GradientNorms()])
    for i, block in enumerate(model.blocks):
        square = sum(p.grad.double().square().sum() for p in block.parameters())
        read = found[f"blocks.{i}", "gradient.norm"].item()
        assert read == pytest.approx(float(square) ** 0.5, rel=1e-5)
    everything = sum(p.grad.double().square().sum() for p in model.parameters())
    read = sum(v.double() ** 2 for (_, q), v in found.items() if q == "gradient.norm")
    assert float(read) == pytest.approx(float(everything), rel=1e-5)


def test_a_second_backward_counts_what_has_accumulated() -> None:
    model = gpt()
    measured(model, [])  # leaves its gradients in place
    found = measured(model, [GradientNorms()])
    square = sum(p.grad.double().square().sum() for p in model.blocks[0].parameters())
    read = found["blocks.0", "gradient.norm"].item()
    assert read == pytest.approx(float(square) ** 0.5, rel=1e-5)


def sublayers(model: torch.nn.Module) -> list[Tensor]:
    """Return the norms' inputs and outputs in forward order, kept in the graph."""
    kept: list[Tensor] = []
    handles = [
        getattr(block, name).register_forward_hook(
            lambda module, args, out: kept.extend((args[0], out))
        )
        for block in model.blocks
        for name in ("attention_norm", "feedforward_norm")
    ]
    kept.append(model(tokens()))
    for handle in handles:
        handle.remove()
    return kept


def test_backward_factors_split_each_sublayer() -> None:
    model = gpt(residual="post")
    found = measured(model, [BackwardFactors()], placement="post")
    *kept, output = sublayers(model)
    grads = torch.autograd.grad(output.square().mean(), kept)
    r, g = grads[0::2], grads[1::2]
    names = [
        f"blocks.{i}.{part}_norm"
        for i in range(3)
        for part in ("attention", "feedforward")
    ]
    for k, name in enumerate(names):
        norm_factor = (r[k].norm() / g[k].norm()).item()
        read = found[name, "backward.norm_factor"].item()
        assert read == pytest.approx(norm_factor, rel=1e-5)
        if k:
            branch = (g[k - 1].norm() / r[k].norm()).item()
            read = found[name, "backward.branch_factor"].item()
            assert read == pytest.approx(branch, rel=1e-5)
    assert (names[0], "backward.branch_factor") not in found


def test_a_pre_norm_model_has_no_such_factors() -> None:
    assert not measured(gpt(), [BackwardFactors()], placement="pre")


class CountingLayerNorm(nn.LayerNorm):
    """Returns more than the normalised states, as integer-only models' norms do."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        return super().forward(x), 1.0


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(8, 8), CountingLayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        normalised, _ = self.norm(x + self.map(x))
        return normalised


def test_a_norm_that_returns_more_than_a_tensor() -> None:
    model = nn.Sequential(CountingBlock(), CountingBlock())
    x = torch.randn(2, 3, 8, requires_grad=True)
    found = measured(model, [BackwardFactors()], x, placement="post")
    assert {site for site, _ in found} == {"0.norm", "1.norm"}
