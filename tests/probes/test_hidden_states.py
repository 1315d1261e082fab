"""B̄, norm scales and the stream's shape against plain hooks and loops."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.anatomy.discovery import anatomy_of
from equipoise.numerics.token_statistics import kurtosis, token_cosine
from equipoise.probes.capture import Boundary, attached
from equipoise.probes.hidden_states import (
    NO_SEQUENCES,
    Magnitudes,
    NormScales,
    StreamShape,
)
from equipoise.probes.logits import OutputLogits
from tests.probes.reading import Emitter, gpt, measured, tokens


def inputs_of(model: nn.Module, name: str) -> Tensor:
    """Return what a submodule was given, by a hook that shares nothing with ours."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    )
    model(tokens())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_B_is_the_longest_token(residual: str) -> None:
    model = gpt(residual=residual)
    found = measured(model, [Magnitudes()])
    for i in range(3):
        stream = inputs_of(model, f"blocks.{i}")
        inside = inputs_of(model, f"blocks.{i}.attention")
        longest = max(token.norm().item() for row in stream for token in row)
        assert found[f"blocks.{i}", "residual.B"].item() == pytest.approx(longest)
        longest = max(token.norm().item() for row in inside for token in row)
        read = found[f"blocks.{i}.attention", "attention.B"].item()
        assert read == pytest.approx(longest)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_scales_are_those_of_each_token(kind: str) -> None:
    model = gpt(norm=kind)
    with torch.no_grad():
        model.blocks[1].attention_norm.weight.mul_(-3)
    found = measured(model, [NormScales()])
    site = "blocks.1.attention_norm"
    x = inputs_of(model, site).flatten(0, 1).double()
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    sigma = ((centred**2).mean(-1) + 1e-5).sqrt()
    assert found[site, "norm.sigma.min"].item() == pytest.approx(sigma.min().item())
    assert found[site, "norm.sigma.p50"].item() == pytest.approx(
        sigma.sort().values[(len(sigma) - 1) // 2].item()
    )
    assert found[site, "norm.gain"].item() == pytest.approx(3 / sigma.min().item())


class ShiftedRMSNorm(nn.Module):
    """Stores γ - 1, as Gemma's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps) * (1 + self.weight)


def read(model: nn.Module, x: Tensor) -> Emitter:
    emit, anatomy = Emitter(), anatomy_of(model)
    with attached([NormScales()], anatomy, emit, boundary=Boundary(strict=True)):
        model(x)
    return emit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gain_is_that_of_the_weight_as_it_is_used(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(ShiftedRMSNorm(8)), torch.randn(2, 5, 8)
    with torch.no_grad():
        model[0].weight[3] = 1.5
    sigma = x.to(dtype).float().square().mean(-1).add(1e-6).sqrt().min()
    gain = read(model.to(dtype), x.to(dtype)).found["0", "norm.gain"]
    assert gain.item() == pytest.approx(2.5 / sigma.item(), rel=1e-2)


class Functional(nn.Module):
    """Norms that are functions: of the stream, then twice of what a map made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, (8,))
        return F.layer_norm(self.inner(x), (8,), weight=self.scale, eps=1e-5)


def test_norms_that_are_functions_are_read_under_their_caller() -> None:
    model, x = nn.Sequential(Functional()), torch.randn(2, 5, 8)
    found = read(model, x).found
    rms = x.square().mean(-1).sqrt()
    assert found["0", "norm.sigma.min"].item() == pytest.approx(rms.min().item())
    assert found["0", "norm.gain"].item() == pytest.approx(1 / rms.min().item())
    inner = model[0].inner(F.rms_norm(x, (8,)))
    least = inner.var(-1, unbiased=False).sqrt().min().item()
    assert found["0#1", "norm.gain"].item() == pytest.approx(3 / least, rel=1e-5)


def test_functions_that_norm_modules_call_are_not_read_twice() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Functional())
    assert {site for site, _ in read(model, torch.randn(2, 5, 8)).found} == {"0"}


def test_kurtosis_of_known_samples(rng: torch.Generator) -> None:
    assert kurtosis(torch.tensor([1.0, -1.0, 1.0, -1.0])).item() == pytest.approx(1)
    gaussian = torch.randn(200_000, generator=rng, dtype=torch.float64)
    # The sample kurtosis has standard deviation √(24/n) = 0.011: 3σ and a shift.
    assert kurtosis(gaussian + 5).item() == pytest.approx(3, abs=0.04)


def test_the_stream_is_read_where_blocks_begin() -> None:
    model = gpt()
    found = measured(model, [StreamShape()])
    x = inputs_of(model, "blocks.2")
    expected = token_cosine(x).mean().item()
    assert found["blocks.2", "residual.token_cosine"].item() == pytest.approx(expected)
    assert found["blocks.2", "residual.kurtosis"].item() == pytest.approx(
        kurtosis(x).item()
    )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(self.norm(x))
        return out


@pytest.mark.parametrize("layout", ["jagged", "strided", "pack"])
def test_tokens_of_a_nested_tensor_or_pack_are_read(
    layout: str, rng: torch.Generator
) -> None:
    model = nn.Sequential(*(Normed() for _ in range(2)))
    rows = [torch.randn(length, 6, generator=rng) for length in (3, 1, 4)]
    pack = torch.cat(rows)
    x = pack
    if layout != "pack":
        x = torch.nested.nested_tensor(rows, layout=getattr(torch, layout))
    emit, probes = (
        Emitter(),
        [Magnitudes(), NormScales(), StreamShape(), OutputLogits()],
    )
    anatomy = anatomy_of(model)
    with attached(probes, anatomy, emit, boundary=Boundary(strict=True)):
        model(x)
    second = model[0](pack)
    sigma = second.var(-1, unbiased=False).add(1e-5).sqrt()
    assert emit.found["1", "residual.B"].item() == pytest.approx(
        second.norm(dim=-1).max().item()
    )
    assert emit.found["1.norm", "norm.sigma.min"].item() == pytest.approx(
        sigma.min().item()
    )
    rms = model(pack).square().mean().sqrt().item()
    assert emit.found["", "output.logit_norm"].item() == pytest.approx(rms)
    assert emit.reasons["1"] == [NO_SEQUENCES]
