"""The RMS predictor of a head against emulation, brute force and its invariances."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS
from equipoise.numerics.fragility import head_error
from tests.numerics.fragility_heads import Head, heads
from tests.oracles import fragility as oracle

NARROW = ["fp16", "bf16", "e4m3", "e5m2"]


def predicted(head: Head, name: str) -> float:
    found = head_error(head.qkv, head.w, format=FORMATS[name], visible_QK=head.visible)
    return found.relative.item()


@pytest.mark.parametrize("name", NARROW)
def test_tracks_emulation(name: str) -> None:
    sample = list(heads(72, seed=7))
    foreseen = torch.tensor([predicted(head, name) for head in sample])
    seen = torch.stack(
        [
            oracle.measured_head_error(h.parts, FORMATS[name], visible=h.visible)
            for h in sample
        ]
    ).float()
    ratio = seen / foreseen
    assert 0.9 <= ratio.median() <= 1.1
    assert ratio.quantile(0.05) >= 0.5
    assert ratio.quantile(0.95) <= 1.5
    assert torch.corrcoef(torch.stack([seen.log(), foreseen.log()]))[0, 1] >= 0.95


@pytest.mark.parametrize("tensor", ["query", "key", "value", "weight"])
def test_what_is_given_is_carried_by_the_derivative(tensor: str) -> None:
    head = next(iter(heads(1, seed=3)))
    fmt = FORMATS["bf16"]
    found = head_error(head.qkv, head.w, format=fmt).terms[tensor]
    torch.testing.assert_close(found, oracle.carried_term(head.parts, {tensor}, fmt))


def test_what_is_given_is_carried_together() -> None:
    head = next(iter(heads(1, seed=3)))
    fmt = FORMATS["bf16"]
    every = {"query", "key", "value", "weight"}
    found = head_error(head.qkv, head.w, format=fmt).inputs
    torch.testing.assert_close(found, oracle.carried_term(head.parts, every, fmt))


@pytest.mark.parametrize("tensor", ["score", "mix"])
def test_what_is_made_is_its_jacobian_times_residuals(tensor: str) -> None:
    """Σ r(x)²‖∂O/∂x‖² with a dense autograd Jacobian: no closed form in sight."""
    head = next(iter(heads(1, seed=3)))
    head = Head(*(x[:9] for x in head.qkv), head.w[:, :12], None, "small")
    fmt = FORMATS["bf16"]
    found = head_error(head.qkv, head.w, format=fmt).terms[tensor]
    torch.testing.assert_close(found, oracle.head_term(head.parts, tensor, fmt))


def test_identical_tokens_are_rounded_alike() -> None:
    # Independent residuals would read up to 1.7 times too low here.
    head = next(iter(heads(1, seed=8)))
    head = Head(*(x[:1].expand(32, -1) for x in head.qkv), head.w, None, "repeated")
    seen = oracle.measured_head_error(head.parts, FORMATS["fp16"]).item()
    assert 0.8 < seen / predicted(head, "fp16") < 1.25


def test_prob_term_is_exact_for_equal_rows(rng: torch.Generator) -> None:
    # Uniform rows: every probability is rounded alike, so the error is coherent.
    N, d = 100, 16
    v = torch.randn(N, d, generator=rng, dtype=torch.float64) + 2
    q, k = (
        torch.zeros(N, d, dtype=torch.float64),
        torch.randn(N, d, generator=rng).double(),
    )
    w = torch.eye(d, dtype=torch.float64)
    fmt = FORMATS["e5m2"]
    found = head_error((q, k, v), w, format=fmt).prob
    residual = oracle.rounded(torch.tensor([1 / N], dtype=torch.float64), fmt) - 1 / N
    torch.testing.assert_close(found, N * (residual * v.sum(0)).square().sum())


# Formats with room below: in fp16 and fp8 a rescaling pushes entries subnormal.
@pytest.mark.parametrize("name", ["bf16", "tf32"])
@pytest.mark.parametrize("c", [2.0**-3, 2.0**4])
def test_power_of_two_rescalings_change_nothing(name: str, c: float) -> None:
    for head in heads(6, seed=11):
        before = predicted(head, name)
        moved = Head(head.q, head.k, head.v * c, head.w / c, head.visible, head.kind)
        turned = Head(head.q * c, head.k / c, head.v, head.w, head.visible, head.kind)
        assert predicted(moved, name) == pytest.approx(before, rel=1e-6)
        assert predicted(turned, name) == pytest.approx(before, rel=1e-6)


def test_a_common_value_offset_does_not_reach_the_score_terms(
    rng: torch.Generator,
) -> None:
    head = next(iter(heads(1, seed=5)))
    far = (head.q, head.k, head.v + 2.0**20)
    near = head_error(head.qkv, head.w, format=FORMATS["bf16"])
    moved = head_error(far, head.w, format=FORMATS["bf16"])
    torch.testing.assert_close(near.score, moved.score, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_are_heads_side_by_side(dtype: torch.dtype) -> None:
    def stacked(x: Tensor) -> Tensor:
        return torch.stack([x, 2 * x]).to(dtype)

    head = next(iter(heads(1, seed=2)))
    both = head_error(
        (stacked(head.q), stacked(head.k), stacked(head.v)),
        stacked(head.w),
        format=FORMATS["fp16"],
    )
    assert both.relative.shape == (2,)
    alone = predicted(head, "fp16")
    assert both.relative[0].item() == pytest.approx(alone, rel=1e-2)


def test_broken_input_reads_nan(rng: torch.Generator) -> None:
    head = next(iter(heads(1, seed=2)))
    head.q[0, 0] = math.nan
    found = head_error(head.qkv, head.w, format=FORMATS["bf16"])
    assert found.relative.isnan()
    with pytest.raises(InputError, match="do not fit together"):
        head_error(
            (head.q[:, :8], head.k, head.v),
            head.w,
            format=FORMATS["bf16"],
        )
