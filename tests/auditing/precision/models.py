"""Small models, each storing its numbers in another way."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """x + MLP(LN(x)): four modules store something, and the block itself its sum."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Attends(nn.Module):
    """Fused attention over projected inputs, causal or not."""

    def __init__(self, width: int = 8, heads: int = 2, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        shape = (B, T, 3, self.heads, C // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Tokens(nn.Module):
    """Embedding, attention, residual, head; tied or not."""

    def __init__(self, width: int = 8, *, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(11, width)
        self.attend = Attends(width, causal=True)
        self.mlp = Residual(width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.mlp(x + self.attend(x))
        return F.linear(x, self.embed.weight if self.tied else self.head.weight)


def tokens(*, tied: bool = True) -> tuple[Tokens, Tensor]:
    torch.manual_seed(0)
    model = Tokens(tied=tied).double()
    return model, torch.randint(0, 11, (2, 4))
