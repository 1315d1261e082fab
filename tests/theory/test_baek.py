"""The published indicators say what their papers' code says, faults included."""

import math

import pytest
import torch

from equipoise.numerics.formats import FORMATS
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2
from equipoise.theory.softmax_norms import softmax_jacobian_norm


def qkv(
    rng: torch.Generator, H: int = 3, N: int = 10, d: int = 4
) -> list[torch.Tensor]:
    return list(torch.randn(3, H, N, d, generator=rng, dtype=torch.float64))


def test_v1_attention_terms(rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    norm = torch.linalg.matrix_norm
    exact = norm(q, ord=2) * norm(k, ord=2) / norm(q @ k.mT, ord=2)
    found = v1.kappa_score(q, k, generator=rng)
    # Seven power iterations under-read each norm by a few per cent.
    assert found.item() == pytest.approx(exact.max().item(), rel=0.15)
    sigma = torch.linalg.svdvals(v)
    worst = (sigma[:, 0] / (sigma[:, -1] + 3e-6)).max()
    assert v1.kappa_value(v, generator=rng).item() == pytest.approx(worst.item())
    weights = [torch.diag(torch.tensor([4.0, 2.0])), torch.eye(2)]
    assert v1.kappa_eff(*weights).item() == pytest.approx(3.0, rel=1e-5)


def test_v1_row_softmax_matches_two_keys(rng: torch.Generator) -> None:
    # Two keys with a gap of 1: J has norm 2p₁p₂.
    s = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    p = s.softmax(-1)[0]
    exact = 2 * p[0] * p[1] * 1.0 / p.norm()
    assert v1.kappa_softmax(s, generator=rng).item() == pytest.approx(exact.item())
    hidden = torch.tensor([[1.0, 0.0, -math.inf]], dtype=torch.float64)
    assert v1.kappa_softmax(hidden, generator=rng).item() == pytest.approx(exact.item())


def test_the_authors_estimators_read_low(rng: torch.Generator) -> None:
    p = (2 * torch.randn(500, 32, generator=rng, dtype=torch.float64)).softmax(-1)
    exact = softmax_jacobian_norm(p)
    seven = v1.softmax_gain_estimate(p, generator=rng) / exact
    two = v2.softmax_gain_estimate(p) / exact
    assert (seven <= 1 + 1e-9).all() and (two <= 1 + 1e-9).all()
    assert two.min() < seven.min() < 0.95


def test_v1_layernorm_terms() -> None:
    x = torch.tensor([[2.0, -2.0], [1.0, -1.0], [0.0, 0.0]])
    assert v1.c_ln(x, eps=1e-2).item() == pytest.approx(10 + 100 + 1)
    rho = v1.rho_ln(x, eps=1e-2, format=FORMATS["fp16"])
    assert rho.item() == pytest.approx(100 * 2 * 2**-10)
    # Twice: another epsilon convention; 5/3: mean instead of median variance.
    other = v2.rho_ln(x, eps=1e-2, format=FORMATS["fp16"])
    assert other == pytest.approx(rho.item() / 2 * 5 / 3)


def test_v1_predictor_adds_up() -> None:
    block = v1.BlockV1(
        kappa_softmax=2,
        kappa_score=3,
        kappa_value=5,
        output_norm=7,
        kappa_eff=11,
        c_ln=13,
    )
    assert block.attention == 280
    assert block.predictor == 304
    assert v1.predicted_error([block, block], FORMATS["fp16"]) == 608 * 2**-10


def test_v2_attention_terms(rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    found = v2.attention_v2((q, k, v))
    s = q @ k.mT / 2
    p = s.softmax(-1)
    gain = found.gain.item()
    assert found.kappa_softmax.item() == pytest.approx(
        (s.norm() / p.norm()).item() * gain
    )
    assert found.chi_score.item() == pytest.approx(
        (q.norm() * k.norm() / 2 / p.norm()).item() * gain
    )
    top = torch.linalg.matrix_norm(v, ord=2).max().item()
    assert found.magnitude.item() == pytest.approx(
        gain * (s.norm() + q.norm() * k.norm() / 2).item() * top
    )
    assert found.kappa_val.item() == pytest.approx(
        p.norm().item() * top / (p @ v).norm().item()
    )


def test_v2_hides_keys_as_zeros(rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()
    s = (q @ k.mT / 2).masked_fill(~visible, 0.0)
    assert v2.attention_v2((q, k, v), visible_NK=visible).s.item() == pytest.approx(
        s.norm().item()
    )


def test_v2_risk_carries_forward() -> None:
    blocks = [
        v2.BlockV2(attention=1, layernorm=2, remainder=1, transport=t, rho_ln=r)
        for t, r in ((0.5, 0.0), (1.0, 1.0), (2.0, 3.0))
    ]
    assert v2.risks(blocks, final_norm=2.0) == pytest.approx([2 * 2 * 3, 2 * 3, 2])
    scores = v2.bgss_scores(blocks, final_norm=2.0, format=FORMATS["fp16"])
    assert scores == pytest.approx([2**-11 * 1.5 * x for x in (12, 12, 8)])
    assert v2.transport_surrogate((1.0, 2.0), (1.0, 4.0)) == pytest.approx(0.875)


def test_v2_layernorm_magnitude() -> None:
    x = torch.tensor([[2.0, -2.0], [1.0, -1.0]])
    v, eps = 2.5, 0.5
    exact = 3 * (eps + 2 * v) / (v + eps) ** 1.5 * x.norm().item()
    gain = torch.tensor([1.0, -3.0])
    assert v2.layernorm_magnitude(x, eps=eps, gain=gain) == pytest.approx(exact)
    assert v2.layernorm_magnitude(x, eps=eps) == pytest.approx(exact / 3)


def test_nan_is_not_hidden(rng: torch.Generator) -> None:
    q, k, v = qkv(rng)
    q[0, 0, 0] = math.nan
    assert v1.kappa_score(q, k, generator=rng).isnan()
    assert math.isnan(v2.attention_v2((q, k, v)).magnitude)
