"""Bounds on curvature: never below a dense Hessian, and how far above it."""

import math

import pytest
import torch

from equipoise.errors import InputError
from equipoise.numerics.curvature.attention_blocks import attention_hessian
from equipoise.numerics.curvature.attention_bounds import (
    attention_curvature_bound,
    attention_norm_bound,
    top,
)
from equipoise.numerics.curvature.block_bounds import block_curvature_bound
from equipoise.numerics.lipschitz.heads import Heads
from equipoise.numerics.lipschitz.rotary import rotary
from tests.numerics import curvature_layers as layers
from tests.numerics.curvature_draws import Draw

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


def test_what_no_bound_is_known_for_is_said() -> None:
    layer = layers.random_layer(0, scale=1.0)
    heads, x = layers.heads_of(layer), layer.x_LD
    turned = Heads(
        w_q_HDE=torch.ones(1, 3, 2),
        w_k_GDE=torch.ones(1, 3, 2),
        w_v_GDF=torch.ones(1, 3, 2),
        w_o_HFD=torch.ones(1, 2, 3),
        rotary=rotary(4, 2),
    )
    with pytest.raises(InputError, match="no rotation"):
        attention_curvature_bound(turned, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(InputError, match="one head"):
        attention_norm_bound(turned, torch.ones(4, 3), torch.ones(4, 3))
    block = layers.post_norm(layers.random_block(0))
    gated = type(block.net)(
        w_in_DM=block.net.w_in_DM,
        w_out_MO=block.net.w_out_MO,
        w_up_DM=block.net.w_in_DM,
    )
    broken = type(block)(
        heads=heads,
        net=gated,
        gain_1_D=block.gain_1_D,
        gain_2_D=block.gain_2_D,
        shift_1_D=block.shift_1_D,
        eps=0.0,
    )
    with pytest.raises(InputError, match="plain net"):
        block_curvature_bound(broken, x, x, loss_curvature=1.0)
