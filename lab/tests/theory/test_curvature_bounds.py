"""Bounds on curvature: never below a dense Hessian, and how far above it."""

import math
from dataclasses import replace

import pytest
import torch

from equipoise.errors import InputError
from equipoise.theory.lipschitz.heads import Heads, Rotary, rotary
from equipoise_lab.theory.curvature.attention_blocks import attention_hessian
from equipoise_lab.theory.curvature.attention_bounds import (
    attention_curvature_bound,
    attention_norm_bound,
    top,
)
from equipoise_lab.theory.curvature.block_bounds import block_curvature_bound
from lab.tests.theory import curvature_layers as layers
from lab.tests.theory.curvature_draws import Draw

# Two computations of one norm; a bound may be attained.
ROUNDING = 1 + 1e-9


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_attention_bounds_hold(scale: float) -> None:
    for seed in range(15):
        layer = layers.random_layer(seed, scale=scale)
        truth = top(layers.layer_hessian(layer))
        heads, entries = layers.heads_of(layer), layer.x_LD.numel()
        g = 2 / entries * (layer.output - layer.target_LD)
        given = {"loss_curvature": 2 / entries}
        ours = attention_curvature_bound(heads, layer.x_LD, g, **given)
        norms = attention_norm_bound(heads, layer.x_LD, g, **given)
        assert truth <= ours.value * ROUNDING
        assert ours.value <= norms * ROUNDING
        assert ours.value <= ours.functional + ours.outer + 1e-9


def test_heads_that_share_keys_are_bounded_together() -> None:
    for seed in range(10):
        draw = Draw(seed)
        H, G, L, D, E, F = 4, 2, 5, 3, 2, 2
        q, k, v, o = (
            draw.normal(*s) for s in ((H, D, E), (G, D, E), (G, D, F), (H, F, D))
        )
        heads = Heads(w_q_HDE=q, w_k_GDE=k, w_v_GDF=v, w_o_HFD=o)
        x, g, seen = draw.normal(L, D), draw.normal(L, D), draw.seen(L)
        found = attention_hessian(heads, x, g, mask=seen, output=False)
        bound = attention_curvature_bound(heads, x, g, mask=seen)
        assert top(found.dense()) <= bound.functional * ROUNDING


def equal_heads(draw: Draw, *, query: float, copies: int) -> Heads:
    """Return equal heads on one W_K = 0 and one W_V."""
    q, v, o = draw.normal(1, 3, 2), draw.normal(1, 3, 2), draw.normal(1, 2, 3)
    return Heads(
        w_q_HDE=query * q.expand(copies, -1, -1),
        w_k_GDE=torch.zeros(1, 3, 2, dtype=torch.float64),
        w_v_GDF=v,
        w_o_HFD=o.expand(copies, -1, -1),
        causal=True,
    )


@pytest.mark.parametrize(("query", "copies"), [(0.0, 1), (1e3, 1), (1e3, 4)])
def test_single_terms_are_attained_where_they_stand_alone(
    query: float, copies: int
) -> None:
    # W_Q = W_K = 0 leaves what scores bend in q and k together. With W_Q large the
    # block of W_K is all, and that of one head times their number; of three causal
    # queries only the last bends: two equal keys do not, nor does one.
    draw = Draw(0)
    heads = equal_heads(draw, query=query, copies=copies)
    x, g = draw.normal(3, 3), draw.normal(3, 3)
    truth = top(attention_hessian(heads, x, g, output=False).dense())
    bound = attention_curvature_bound(heads, x, g).functional
    assert 0 < truth <= bound * ROUNDING <= 1.01 * truth


def test_equal_heads_on_one_value_add_up() -> None:
    # With W_Q = W_K = 0 only W_V moves the output: four heads, four times as far.
    draw, zero = Draw(0), torch.zeros(3, 3, dtype=torch.float64)
    heads = equal_heads(draw, query=0.0, copies=4)
    x = draw.normal(3, 3)
    mixed = torch.ones(3, 3).to(x).tril() / torch.tensor([[1.0], [2.0], [3.0]]) @ x
    truth = (4 * top(mixed) * top(heads.w_o_HFD[0])) ** 2
    bound = attention_curvature_bound(heads, x, zero, loss_curvature=1.0)
    assert bound.value == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_bound_holds(activation: str) -> None:
    for seed in range(12):
        eps = (0.0, 0.1)[seed % 2]
        block = layers.random_block(seed)
        truth = top(layers.block_hessian(block, activation, eps))
        x, target = block.attention.x_LD, block.attention.target_LD
        weights = layers.block_weights(block)
        out = layers.block_output(x, *weights, activation=activation, eps=eps)
        ours = block_curvature_bound(
            layers.post_norm(block, activation, eps),
            x,
            2 / x.numel() * (out - target),
            loss_curvature=2 / x.numel(),
        )
        assert truth <= ours * ROUNDING
        assert ours < 1e4 * truth


def test_nan_in_nan_out() -> None:
    block = layers.random_block(0)
    x, held = block.attention.x_LD, layers.post_norm(block)
    broken = x.clone()
    broken[0, 0] = torch.nan
    found = attention_curvature_bound(held.heads, broken, x)
    assert math.isnan(found.value) and math.isnan(found.functional)
    assert math.isnan(block_curvature_bound(held, x, broken, loss_curvature=1.0))


def test_unsupported_layers_raise() -> None:
    # Turned row by row, X W may be longer than ‖X‖‖W‖: norms alone do not do.
    turned = Heads(
        w_q_HDE=torch.ones(1, 3, 2),
        w_k_GDE=torch.ones(1, 3, 2),
        w_v_GDF=torch.ones(1, 3, 2),
        w_o_HFD=torch.ones(1, 2, 3),
        rotary=rotary(4, 2),
    )
    with pytest.raises(InputError, match="one head"):
        attention_norm_bound(turned, torch.ones(4, 3), torch.ones(4, 3))


def turned_heads(draw: Draw, *, E: int, L: int, H: int = 2, G: int = 1) -> Heads:
    D, F = draw.number(2, 3), 2
    return Heads(
        w_q_HDE=draw.normal(H, D, E),
        w_k_GDE=draw.normal(G, D, E),
        w_v_GDF=draw.normal(G, D, F),
        w_o_HFD=draw.normal(H, F, D),
        rotary=rotary(L, 2 * draw.number(1, E // 2), interleaved=draw.number(0, 1) > 0),
    )


def test_rotated_heads_are_bounded() -> None:
    for seed in range(25):
        draw, L = Draw(seed), 5
        heads = turned_heads(draw, E=4, L=L)
        D = heads.w_q_HDE.shape[1]
        x, g, seen = draw.normal(L, D), draw.normal(L, D), draw.seen(L)
        truth = top(attention_hessian(heads, x, g, mask=seen, output=False).dense())
        bound = attention_curvature_bound(heads, x, g, mask=seen).functional
        assert truth <= bound * ROUNDING <= 20 * truth


def test_a_rotation_by_nothing_bounds_no_less() -> None:
    # Both ways to see a rotated key are ways to see a plain one, and no better.
    draw, L = Draw(3), 4
    plain = replace(turned_heads(draw, E=2, L=L), rotary=None)
    still = Rotary(cos_LR=torch.ones(L, 2), sin_LR=torch.zeros(L, 2))
    x, g = (draw.normal(L, plain.w_q_HDE.shape[1]) for _ in range(2))
    given = {"loss_curvature": 0.3}
    without = attention_curvature_bound(plain, x, g, **given)
    turned = attention_curvature_bound(replace(plain, rotary=still), x, g, **given)
    assert without.functional <= turned.functional * ROUNDING
    assert without.outer <= turned.outer * ROUNDING


def test_a_rotation_meets_q_and_k_exactly() -> None:
    # With W_Q = W_K = 0 nothing bends but the scores, which are linear in q and in k.
    for seed in range(10):
        draw, L = Draw(seed), 4
        heads = turned_heads(draw, E=4, L=L, H=1)
        silent = replace(heads, w_q_HDE=0 * heads.w_q_HDE, w_k_GDE=0 * heads.w_k_GDE)
        x, g = (draw.normal(L, heads.w_q_HDE.shape[1]) for _ in range(2))
        truth = top(attention_hessian(silent, x, g, output=False).dense())
        bound = attention_curvature_bound(silent, x, g).functional
        assert bound == pytest.approx(truth, rel=1e-9)
