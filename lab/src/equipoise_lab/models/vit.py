"""A vision transformer, from Baek's Tiny-ViT to Petrov's.

Axes, in this file:  B batch · I input channel · Y X pixels · T token · C channel ·
P pixel of a patch · O class.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise_lab.models.block import add_sinusoidal, blocks, final_norm, initialise
from equipoise_lab.models.config import BlockConfig
from equipoise_lab.options import one_of, preset, require


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """A classifier of square images cut into square patches."""

    image: int = 32
    channels: int = 3
    patch: int = 4
    classes: int = 10
    pool: Literal["cls", "mean"] = "cls"
    position_std: float = 0.02
    """Of learned positions and of the CLS token; Baek's are N(0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("pool", self.pool, ("cls", "mean"))
        one_of("positions", self.positions, ("learned", "sinusoidal", "none"))
        for name in ("image", "channels", "patch", "classes"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        require(
            self.image % self.patch == 0,
            f"an image of {self.image} does not cut into patches of {self.patch}",
        )

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + (self.pool == "cls")


class ViT(nn.Module):
    """Images (B, channels, image, image) to class logits.

    >>> ViT(ViTConfig())(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        pixels = config.channels * config.patch**2
        self.patch_embedding = nn.Linear(pixels, config.width)
        if config.pool == "cls":
            self.cls = nn.Parameter(torch.empty(config.width))
        if config.positions == "learned":
            self.position_TC = nn.Parameter(torch.empty(config.tokens, config.width))
        elif config.positions == "sinusoidal":
            add_sinusoidal(self, config.tokens, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = blocks(config, causal=False)
        self.final_norm = final_norm(config)
        self.head = nn.Linear(config.width, config.classes)
        initialise(self, config)
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=config.position_std)

    def forward(self, image_BIYX: Tensor) -> Tensor:
        x_BTC = self.dropout(self.embedded(image_BIYX))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.final_norm(x_BTC)
        pooled_BC = x_BTC[:, 0] if self.config.pool == "cls" else x_BTC.mean(1)
        logits_BO: Tensor = self.head(pooled_BC)
        return logits_BO

    def embedded(self, image_BIYX: Tensor) -> Tensor:
        wanted = (self.config.channels, self.config.image, self.config.image)
        if image_BIYX.shape[1:] != wanted:
            got = tuple(image_BIYX.shape[1:])
            raise InputError(f"images of shape {got}; this model reads {wanted}")
        x_BTC: Tensor = self.patch_embedding(patches(image_BIYX, self.config.patch))
        if self.config.pool == "cls":
            x_BTC = torch.cat([self.cls.expand(len(x_BTC), 1, -1), x_BTC], 1)
        if self.config.positions != "none":
            x_BTC = x_BTC + self.position_TC
        return x_BTC


def patches(image_BIYX: Tensor, side: int) -> Tensor:
    """Return (B, T, P): patches in reading order, pixels as (row, column, channel)."""
    grid = image_BIYX.unfold(2, side, side).unfold(3, side, side)
    return grid.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


_PETROV = ViTConfig(
    heads=1, residual="post", positions="sinusoidal", pool="mean", ffn_bias=False
)
VITS = {
    # Baek §4: CIFAR-10, inner width 4 · 64 whatever the model's.
    "baek-tiny": ViTConfig(
        width=128,
        depth=2,
        head_width=64,
        ffn_width=256,
        qkv_bias=False,
        position_std=1.0,
    ),
    # Petrov: 3642 parameters.
    "petrov-mnist": replace(
        _PETROV, image=28, channels=1, width=16, depth=1, ffn_width=64
    ),
    "petrov-cifar": replace(_PETROV, classes=100, width=128, depth=8, ffn_width=512),
}


def vit_preset(name: str) -> ViTConfig:
    """Return the named vision transformer."""
    return preset(VITS, name)
