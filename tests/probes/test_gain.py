"""Projection norms, head products and the local bound against dense linear algebra."""

import pytest
import torch
from torch import Tensor

from equipoise.probes.gain import HeadProducts, ProjectionGain
from equipoise.probes.lipschitz import LocalLipschitz
from tests.probes.reading import gpt, measured, tokens


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
