"""Every axis the papers vary, as one checked set of options."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.errors import InputError
from equipoise.numerics.scaling import PATH_LENGTH
from equipoise_lab.options import one_of, require

Residual = Literal["pre", "post", "deepnorm", "deepnorm-original", "sandwich"]
Attention = Literal["standard", "shared", "linear"]
Activation = Literal["gelu", "relu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Gains = Literal["none", "path", "deepnorm", "gpt2"]
Positions = Literal["learned", "sinusoidal", "rope", "none"]

_CHOICES = {
    "residual": get_args(Residual),
    "attention": get_args(Attention),
    "activation": get_args(Activation),
    "norm": get_args(Norm),
    "gains": get_args(Gains),
    "positions": get_args(Positions),
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A stack of transformer blocks; GPT and ViT add what goes in and comes out."""

    width: int = 64
    depth: int = 4
    heads: int = 4
    kv_heads: int | None = None
    """Fewer than ``heads`` gives grouped-query attention."""
    head_width: int | None = None
    """Default width / heads; Baek's Tiny-ViT has 64 whatever the width."""
    ffn_width: int | None = None
    """Default 4 · width."""
    residual: Residual = "pre"
    """deepnorm is LN(x + (2N)^(-1/4) f), deepnorm-original LN((2N)^(1/4) x + f)."""
    norm: Norm = "layernorm"
    epsilon: float = 1e-5
    attention: Attention = "standard"
    """shared: W_Q = W_K. linear: φ = elu + 1, normalised, no softmax."""
    qk_norm: bool = False
    softcap: float | None = None
    """Scores become cap · tanh(scores / cap)."""
    temperature: float = 1.0
    """τ divides the scaled scores; a remedy may change it while training."""
    activation: Activation = "gelu"
    experts: int = 0
    """0 is one feed-forward network; more is a routed mixture."""
    experts_per_token: int = 2
    positions: Positions = "learned"
    dropout: float = 0.0
    qkv_bias: bool = True
    output_bias: bool = True
    ffn_bias: bool = True
    init_std: float | None = None
    """Of every matrix. Default 0.02·√(1280/width), which keeps operator norms."""
    embedding_std: float | None = None
    """Default the same as the matrices'."""
    gains: Gains = "none"
    """path: N^(-1/m) on Q, K, V, O. deepnorm: (8N)^(-1/4) on V, O and the FFN.
    gpt2: (2N)^(-1/2) on what writes to the residual stream."""
    gain: float = 1.0
    """Multiplies Q, K, V, O on top of ``gains``."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        for name in ("width", "depth", "heads", "temperature", "epsilon", "gain"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        self._check_heads()
        self._check_parts()

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise InputError(
                f"width {self.width} does not divide into {self.heads} heads; "
                "change heads or give head_width"
            )
        if self.heads % self.groups:
            raise InputError(
                f"{self.heads} heads cannot share {self.groups} kv_heads evenly"
            )
        require(
            self.positions != "rope" or self.per_head % 2 == 0,
            f"rope turns pairs of channels; head width {self.per_head} is odd",
        )

    def _check_parts(self) -> None:
        require(0 <= self.dropout < 1, f"dropout {self.dropout} is not in [0, 1)")
        require(self.softcap is None or self.softcap > 0, "softcap must be positive")
        require(
            self.experts == 0 or 1 <= self.experts_per_token <= self.experts,
            f"experts_per_token {self.experts_per_token} of {self.experts} experts",
        )
        require(
            self.attention != "shared" or self.groups == self.heads,
            "shared W_Q = W_K needs as many kv_heads as heads",
        )

    @property
    def per_head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        return self.ffn_width or 4 * self.width

    @property
    def std(self) -> float:
        return self.init_std or 0.02 * math.sqrt(1280 / self.width)


def path_gain(config: BlockConfig) -> float:
    """Return N^(-1/m): the largest safe scale of m maps in one sensitive path.

    >>> path_gain(BlockConfig(depth=16)), path_gain(BlockConfig(depth=16, heads=1))
    (0.5, 0.5)
    """
    return float(config.depth ** (-1 / PATH_LENGTH[config.attention]))
