"""A GPT and a ViT with every axis the papers vary."""

from equipoise_lab.models.block import (
    Block,
    FeedForward,
    MixtureOfExperts,
    Normaliser,
    SelfAttention,
)
from equipoise_lab.models.config import BlockConfig, path_gain
from equipoise_lab.models.gpt import GPT, GPTConfig, gpt_preset
from equipoise_lab.models.vit import ViT, ViTConfig, vit_preset

__all__ = [
    "GPT",
    "Block",
    "BlockConfig",
    "FeedForward",
    "GPTConfig",
    "MixtureOfExperts",
    "Normaliser",
    "SelfAttention",
    "ViT",
    "ViTConfig",
    "gpt_preset",
    "path_gain",
    "vit_preset",
]
