"""Initial weights: one standard deviation for matrices, and the gains on top."""

from collections.abc import Iterator

import torch
from torch import nn

from equipoise.lab.models.attention import SelfAttention
from equipoise.lab.models.config import BlockConfig, path_gain
from equipoise.lab.models.feedforward import FeedForward


def initialise(model: nn.Module, config: BlockConfig) -> None:
    """Draw every Linear from N(0, std²), embeddings from their own, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=config.std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.embedding_std or config.std)
    with torch.no_grad():
        for linear, gain in scaled(model, config):
            linear.weight.mul_(gain)


def scaled(model: nn.Module, config: BlockConfig) -> Iterator[tuple[nn.Linear, float]]:
    """Yield each matrix whose initial size the config changes, and by how much."""
    for module in model.modules():
        if isinstance(module, SelfAttention | FeedForward):
            for name, linear in module.named_children():
                if isinstance(linear, nn.Linear):
                    gain = _gain(name, config)
                    if isinstance(module, SelfAttention):
                        gain *= config.gain
                    yield linear, gain


_DEEPNORM = {"v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}


def _gain(name: str, config: BlockConfig) -> float:
    match config.gains:
        case "path" if name in {"q_proj", "k_proj", "v_proj", "o_proj"}:
            return path_gain(config)
        case "deepnorm" if name in _DEEPNORM:
            return float((8 * config.depth) ** -0.25)
        case "gpt2" if name in {"o_proj", "down_proj"}:
            return float((2 * config.depth) ** -0.5)
        case _:
            return 1.0
