"""One transformer block: how a branch joins the residual stream."""

from collections.abc import Callable

from torch import Tensor, nn

from equipoise.lab.models.attention import Normaliser, SelfAttention
from equipoise.lab.models.config import BlockConfig
from equipoise.lab.models.feedforward import FeedForward, MixtureOfExperts

Map = Callable[[Tensor], Tensor]


def norm(config: BlockConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.width, eps=config.epsilon)


class Block(nn.Module):
    """Attention and feed-forward, joined in one of five residual forms.

    pre          x + f(LN x)
    post         LN(x + f x)
    deepnorm     LN(x + α f x), α = (2N)^(-1/4), as Emadi writes it
    deepnorm-original   LN(a x + f x), a = (2N)^(1/4), as Wang et al. write it
    sandwich     x + LN f(LN x)
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        causal: bool,
        normaliser: Normaliser | None = None,
    ) -> None:
        super().__init__()
        self.residual, self.depth = config.residual, config.depth
        self.attention_norm = norm(config)
        self.attention = SelfAttention(config, causal=causal, normaliser=normaliser)
        self.feedforward_norm = norm(config)
        routed = config.experts > 0
        self.feedforward = (MixtureOfExperts if routed else FeedForward)(config)
        if config.residual == "sandwich":
            self.attention_norm_after = norm(config)
            self.feedforward_norm_after = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        for part in ("attention", "feedforward"):
            x = self.joined(x, part)
        return x

    def joined(self, x: Tensor, part: str) -> Tensor:
        f: Map = getattr(self, part)
        normed: Map = getattr(self, f"{part}_norm")
        match self.residual:
            case "pre":
                return x + f(normed(x))
            case "post":
                return normed(x + f(x))
            case "deepnorm":
                return normed(x + (2 * self.depth) ** -0.25 * f(x))
            case "deepnorm-original":
                return normed((2 * self.depth) ** 0.25 * x + f(x))
            case _:
                after: Map = getattr(self, f"{part}_norm_after")
                return x + after(f(normed(x)))
