"""Fragility readings against plain hooks and dense formulas."""

import pytest
import torch
from torch import Tensor

from equipoise.numerics.formats import FORMATS
from equipoise.probes.attention import AttentionRows
from equipoise.probes.precision import NumericalFragility
from tests.oracles import fragility as oracle
from tests.probes.reading import gpt, measured, tokens

SITE = "blocks.1.attention"


def heads_of(model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of the second block, by hooks that share nothing with ours."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(f"{SITE}.{n}_proj").register_forward_hook(
            lambda m, a, y, n=n: seen.__setitem__(n, y.detach().double())
        )
        for n in "qkv"
    ]
    model(tokens())
    for handle in handles:
        handle.remove()
    q, k, v = (seen[n].unflatten(-1, (2, 8)).transpose(1, 2) for n in "qkv")
    return q, k, v


def test_kappa_softmax_is_within_two_of_the_dense_one() -> None:
    model = gpt()
    found = measured(model, [AttentionRows()])[SITE, "precision.kappa_softmax"]
    q, k, _ = heads_of(model)
    hidden = ~torch.ones(12, 12, dtype=torch.bool).tril()
    s = (q @ k.mT / 8**0.5).masked_fill(hidden, 0.0)
    p = s.masked_fill(hidden, -torch.inf).softmax(-1)
    dense = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    gain = torch.linalg.matrix_norm(dense, ord=2).amax((0, 2))
    exact = gain * (s.square().sum((0, 2, 3)) / p.square().sum((0, 2, 3))).sqrt()
    assert found.shape == (2,)
    assert (exact * (1 - 1e-5) <= found).all()
    assert (found <= 2 * exact).all()


def test_rms_error_is_what_emulation_measures() -> None:
    model = gpt()
    found = measured(model, [NumericalFragility()])[SITE, "precision.rms_error.bf16"]
    q, k, v = heads_of(model)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    eye = torch.eye(8, dtype=torch.float64)
    for h in range(2):
        seen = oracle.measured_head_error(
            (q[0, h], k[0, h], v[0, h], eye), FORMATS["bf16"], visible=visible
        )
        # 12 tokens: few residuals, so single draws scatter.
        assert found[h].item() == pytest.approx(seen.item(), rel=0.35)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_readings(norm: str) -> None:
    model = gpt(norm=norm)
    found = measured(model, [NumericalFragility()])
    site = "blocks.1.attention_norm"
    kappa = found[site, "precision.kappa_ln"].item()
    assert kappa >= 1 - 1e-6 if norm == "layernorm" else kappa == pytest.approx(1)
    assert 0 < found[site, "precision.epsilon_share.p50"] < 1
    assert found[site, "baek_v1.c_ln"] > 1
    assert found[site, "baek_v1.rho_ln"] > 0


def test_published_names_are_kept() -> None:
    found = measured(gpt(), [NumericalFragility()])
    names = {quantity for site, quantity in found if site == SITE}
    assert {f"baek_v1.kappa_{n}" for n in ("softmax", "score", "value")} <= names
    assert {"baek_v2.kappa_softmax", "baek_v2.chi_score", "baek_v2.kappa_val"} <= names
    assert all(values.isfinite().all() for values in found.values())
