"""Shapes people name."""

from typing import TypeVar

from equipoise.errors import InputError
from equipoise.lab.models.gpt import GPTConfig
from equipoise.lab.models.vit import ViTConfig

Config = TypeVar("Config")

GPTS = {
    "demo": GPTConfig(width=64, depth=24, heads=4, context=64),
    "nano": GPTConfig(width=128, depth=6, heads=4, context=128),
    # Emadi §7: 774M parameters with GPT-2's vocabulary.
    "paper-774m": GPTConfig(
        width=1280, depth=36, heads=20, ffn_width=5120, context=1024, vocabulary=50257
    ),
    "llama-tiny": GPTConfig(
        width=128,
        depth=6,
        heads=8,
        kv_heads=2,
        ffn_width=344,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        qkv_bias=False,
        output_bias=False,
        ffn_bias=False,
        tied=False,
    ),
    "moe-tiny": GPTConfig(width=64, depth=6, heads=4, experts=4),
}
VITS = {
    # Baek §4: CIFAR-10, inner width 4 · 64 whatever the model's.
    "baek-tiny": ViTConfig(
        width=128,
        depth=2,
        heads=4,
        head_width=64,
        ffn_width=256,
        qkv_bias=False,
        position_std=1.0,
    ),
    # Petrov: 3642 parameters.
    "petrov-mnist": ViTConfig(
        image=28,
        channels=1,
        width=16,
        depth=1,
        heads=1,
        ffn_width=64,
        residual="post",
        positions="sinusoidal",
        pool="mean",
        ffn_bias=False,
    ),
    "petrov-cifar": ViTConfig(
        classes=100,
        width=128,
        depth=8,
        heads=1,
        ffn_width=512,
        residual="post",
        positions="sinusoidal",
        pool="mean",
        ffn_bias=False,
    ),
}


def gpt_preset(name: str) -> GPTConfig:
    """Return the named decoder; vary it with ``dataclasses.replace``."""
    return _found(GPTS, name)


def vit_preset(name: str) -> ViTConfig:
    """Return the named vision transformer."""
    return _found(VITS, name)


def _found(presets: dict[str, Config], name: str) -> Config:
    if name not in presets:
        raise InputError(f"no preset {name!r}; there are {', '.join(sorted(presets))}")
    return presets[name]
