"""How much stands behind each recommendation, and what authors of known models did."""

from dataclasses import dataclass
from typing import Literal

from equipoise.errors import InputError

Level = Literal["proved", "measured here", "published only", "contradicted here"]
LEVELS: dict[Level, str] = {
    "proved": "follows from arithmetic or from a theorem",
    "measured here": "one of our experiments found it, with the interval given",
    "published only": "another paper or common practice; not tested here, or tested "
    "without an answer",
    "contradicted here": "one of our experiments found otherwise; the value follows it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponent:
    """How the largest gain that trains moves with depth N, with its 95 % interval."""

    found: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"N^({self.found:+.3f} [{self.low:+.3f}, {self.high:+.3f}])"


# docs/results/exponents: pre-LN, width 32, 24 steps, three seeds. A test compares.
LARGEST_GAIN = {
    "standard": Exponent(found=0.106, low=-0.0517, high=0.263),
    "shared": Exponent(found=0.275, low=0.0614, high=0.488),
    "linear": Exponent(found=0.343, low=-0.314, high=1.0),
}
"""Attention → exponent; N^(-1/m) is outside all three intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A paired difference of held-out loss in nats, with its 95 % interval."""

    found: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.found:+.3f} nats [{self.low:+.3f}, {self.high:+.3f}]"


# docs/results/prepost: 24 layers, width 64, 240 steps, three seeds. A test compares.
DEEPNORM_MINUS_PRE = Contrast(found=-0.0927, low=-0.123, high=-0.0628)
DEEPNORM_MINUS_POST = Contrast(found=-0.661, low=-0.701, high=-0.622)
DEEPNORM = (
    f"docs/results/prepost: held-out loss {DEEPNORM_MINUS_PRE} against pre-LN and "
    f"{DEEPNORM_MINUS_POST} against post-LN, 24 layers, all gains 1"
)
# docs/results/temperature: three seeds at three rates. A test compares.
WARMUP = (
    "docs/results/temperature: undecided here; with a warm-up the loss depends on the "
    "learning rate by -0.042 nats [-0.159, +0.074] less or more in post-LN, +0.002 "
    "[-0.071, +0.075] in pre-LN"
)
TEMPERATURE = (
    "docs/results/temperature: moves the held-out loss by at most 0.013 nats against "
    "no warm-up in 6 settings; Adam undoes what it does to gradients"
)

PUBLISHED: dict[str, dict[str, float | str]] = {
    "llama-7b": {
        "attention.scale": 128**-0.5,
        "init.std": "not stated",
        "init.gain.output": "not stated",
        "residual.branch": 1.0,
        "ffn.width": 11008.0,
        "warmup.steps": 2000.0,
        "norm.eps": 1e-6,
    },
}
"""Model → setting → what its authors did."""
SOURCES = {
    "llama-7b": "Touvron et al. 2023 (arXiv 2302.13971), §2.2 and §2.3: RMSNorm before "
    "each sublayer, SwiGLU of width 2/3·4d, 2000 steps of warm-up. Their released "
    "model.py: scale, no residual multiplier, width up to a multiple of 256; it loads "
    "weights and draws none. ε: params.json of the 7B weights (1e-5 in Llama 2). The "
    "0.02 of converted checkpoints is the converter's default, not theirs",
}


def authors_of(name: str) -> dict[str, float | str]:
    """Return what the authors of a known model did, setting by setting.

    >>> authors_of("llama-7b")["ffn.width"]
    11008.0
    """
    if name not in PUBLISHED:
        raise InputError(
            f"no settings of {name!r} are known; known: {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]
