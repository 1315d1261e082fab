"""Small models of every kind that second derivatives stumble over."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import GPT, GPTConfig, ViT, ViTConfig

SHAPE = GPTConfig(width=4, depth=2, heads=2, context=5, vocabulary=5, ffn_width=4)
"""Under 300 parameters: its Hessian can be differenced entry by entry."""


def gpt(**changes: object) -> GPT:
    """Return a GPT whose norms are not the identity."""
    from dataclasses import replace

    torch.manual_seed(0)
    model = GPT(replace(SHAPE, **changes)).double()  # type: ignore[arg-type]
    return disturbed(model)


def disturbed(model: nn.Module) -> nn.Module:  # type: ignore[misc]
    """Return the model with every parameter away from its special initial values."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=rng).to(p)
    return model  # type: ignore[return-value]


def tokens(batch: int = 2, length: int = 5, *, vocabulary: int = 5) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return torch.randint(0, vocabulary, (batch, length), generator=rng)


def pair(batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return tokens and what should follow each."""
    whole = tokens(batch, 6)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Encoder(nn.Module):
    """torch's own encoder layer: fused attention, dropout, and a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=4, dropout=0.5, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x_BTC: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x_BTC).mean(1))
        return logits


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return disturbed(Encoder().double())


def images() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.randn(3, 4, 4, generator=rng).double(), torch.tensor([0, 2, 1])


def vit() -> nn.Module:
    torch.manual_seed(0)
    shape = ViTConfig(
        image=4, patch=2, channels=1, width=4, depth=1, heads=2, ffn_width=4, classes=3
    )
    return disturbed(ViT(shape).double())
