"""Attention in plain operations is the function torch fuses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.anatomy.sdpa import WrittenOut

# Axes: B batch · H head · G key-value head · Q query · K key · D head channel.
B, H, G, Q, K, D = 2, 4, 2, 5, 7, 3


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def qkv(groups: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(B, H, Q, D, seed=1),
        draw(B, groups, K, D, seed=2),
        draw(B, groups, K, D, seed=3),
    )


BOOLEAN = (draw(Q, K, seed=4) > -0.5) | torch.eye(Q, K, dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": BOOLEAN},
        {"attn_mask": draw(B, 1, Q, K, seed=5)},
        {"attn_mask": BOOLEAN[None], "scale": 2.0},
    ],
    ids=str,
)
def test_it_is_the_fused_function(options: dict) -> None:
    expected = F.scaled_dot_product_attention(*qkv(), **options)
    # Float64 sums of seven terms in another order: a few last places.
    torch.testing.assert_close(
        WrittenOut()(*qkv(), **options), expected, rtol=1e-13, atol=1e-14
    )


def test_grouped_keys_serve_neighbouring_heads() -> None:
    expected = F.scaled_dot_product_attention(*qkv(G), enable_gqa=True)
    torch.testing.assert_close(
        WrittenOut()(*qkv(G), enable_gqa=True), expected, rtol=1e-13, atol=1e-14
    )


def test_dropout_scales_what_is_left() -> None:
    q, k, _ = qkv()
    ones = torch.ones(B, H, K, 1, dtype=torch.float64)
    torch.manual_seed(0)
    mixed = WrittenOut()(q, k, ones, dropout_p=0.5)
    assert not torch.allclose(mixed, torch.ones_like(mixed))
    assert abs(mixed.mean().item() - 1) < 0.25  # 40 rows, spread about 0.5 each


def test_each_step_is_the_callers() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def scores(q: Tensor, k: Tensor) -> Tensor:
        seen["scores"] = tuple((q @ k).shape)
        return q @ k

    def weigh(z: Tensor) -> Tensor:
        seen["hidden"] = (int(torch.isinf(z).sum()),)
        return torch.full_like(z, 1 / K)

    def mix(a: Tensor, v: Tensor) -> Tensor:
        seen["mix"] = tuple(a.shape)
        return a @ v

    out = WrittenOut(scores=scores, weigh=weigh, mix=mix)(*qkv(), is_causal=True)
    assert seen["scores"] == seen["mix"] == (B, H, Q, K)
    assert seen["hidden"] == (B * H * sum(K - 1 - i for i in range(Q)),)
    torch.testing.assert_close(out, qkv()[2].mean(-2, keepdim=True).expand(B, H, Q, D))
