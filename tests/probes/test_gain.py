"""Projection norms, head products and the local bound against dense linear algebra."""

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.numerics.rows.finite_step import finite_step
from equipoise.probes.capture import Boundary, attached
from equipoise.probes.finite_step import FiniteSteps
from equipoise.probes.gain import HeadProducts, ProjectionGain
from equipoise.probes.lipschitz import LocalLipschitz
from equipoise.probes.protocols import Emit
from equipoise.probes.selection import softmax_of
from tests.models import SelfAttention
from tests.probes.reading import Emitter, gpt, measured, tokens


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_G_multiplies_the_four_norms(kv_heads: int) -> None:
    model = gpt(kv_heads=kv_heads)
    found = measured(model, [ProjectionGain()])
    attention = model.blocks[1].attention
    norms = {
        x: largest(getattr(attention, f"{x}_proj").weight.detach()) for x in "qkvo"
    }
    site = "blocks.1.attention"
    for letter, norm in norms.items():
        read = found[site, f"projection.norm.{letter}"].item()
        assert read == pytest.approx(norm, rel=1e-5)
    product = norms["q"] * norms["k"] * norms["v"] * norms["o"]
    assert found[site, "projection.G"].item() == pytest.approx(product, rel=1e-4)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_head_products_are_those_of_the_formed_matrices(kv_heads: int) -> None:
    model = gpt(kv_heads=kv_heads)
    found = measured(model, [HeadProducts()])
    attention, site = model.blocks[0].attention, "blocks.0.attention"
    q, k, v, o = (getattr(attention, f"{x}_proj").weight.detach() for x in "qkvo")
    for h in range(2):
        mine, shared = (
            slice(8 * h, 8 * h + 8),
            slice(8 * (h % kv_heads), 8 * (h % kv_heads) + 8),
        )
        qk, vo = largest(q[mine].T @ k[shared]), largest(o[:, mine] @ v[shared])
        assert found[site, "projection.qk"][h].item() == pytest.approx(qk, rel=3e-4)
        assert found[site, "projection.vo"][h].item() == pytest.approx(vo, rel=3e-4)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_the_local_bound_is_never_below_a_real_change(positions: str) -> None:
    """A finite difference along a random direction cannot exceed the bound."""
    torch.manual_seed(0)
    model = gpt(positions=positions, gain=3.0)
    found = measured(model, [LocalLipschitz()], tokens(rows=1))
    attention = model.blocks[0].attention.double()
    x = model.embedded(tokens(rows=1)).double()
    x = model.blocks[0].attention_norm.double()(x).detach()
    bound = found["blocks.0.attention", "attention.lipschitz"].item()
    for _ in range(50):
        direction = torch.randn_like(x)
        direction = direction / direction.norm(dim=-1).amax()
        change = (attention(x + 1e-6 * direction) - attention(x)) / 1e-6
        assert change.norm(dim=-1).amax().item() <= bound * 1.001


def test_with_QK_norm_there_is_no_reading() -> None:
    assert not measured(gpt(qk_norm=True), [LocalLipschitz()])


@pytest.mark.parametrize("where", ["both", "queries"])
def test_a_norm_without_a_name_is_seen_in_the_values(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F.normalize in the forward: no module says so, the lengths do."""
    own = SelfAttention.projected

    def normed(self: SelfAttention, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = own(self, x_BTC)
        unit = torch.nn.functional.normalize
        return 4 * unit(q, dim=-1), unit(k, dim=-1) if where == "both" else k, v

    monkeypatch.setattr(SelfAttention, "projected", normed)
    model, emit = gpt(), Emitter()
    assert not measured(model, [LocalLipschitz()])
    boundary = Boundary(strict=True)
    with attached([LocalLipschitz()], anatomy_of(model), emit, boundary=boundary):
        model(tokens())
    assert {why.code for found in emit.reasons.values() for why in found} == {
        "not_projected"
    }


def test_one_factor_on_the_queries_is_part_of_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models that scale queries themselves: 3·q has three times the query's weight."""
    plain = measured(gpt(gain=2.0), [LocalLipschitz()], tokens(rows=1))
    own = SelfAttention.projected

    def scaled(self: SelfAttention, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = own(self, x_BTC)
        return 3 * q, k / 3, v

    monkeypatch.setattr(SelfAttention, "projected", scaled)
    again = measured(gpt(gain=2.0), [LocalLipschitz()], tokens(rows=1))
    assert len(plain) == len(again) > 0
    for key, value in plain.items():
        torch.testing.assert_close(again[key], value, rtol=1e-4, atol=1e-6)


def test_the_finite_step_is_attained_and_below_its_certificate() -> None:
    model, kept = gpt(gain=3.0), []

    class Keeping(FiniteSteps):
        def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
            kept.append(softmax_of(call.scores(slice(0, 12)))[0])
            super().on_attention(site, call, emit)

    found = measured(model, [Keeping(at_most=12)], tokens(rows=1))
    for (site, quantity), value_H in found.items():
        assert quantity == "attention.finite_step" and value_H.shape == (2,)
        p_HQK = kept[int(site.split(".")[1])]
        truth = finite_step(p_HQK, radius=1.0).upper[:, 1:].mean(-1)
        assert (value_H <= truth + 1e-6).all() and (value_H > 0.9 * truth).all()
