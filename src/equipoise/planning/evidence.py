"""How much stands behind each recommendation, and what authors of known models did."""

from typing import Literal, NamedTuple

from equipoise.errors import InputError

Level = Literal["proved", "measured here", "published only", "contradicted here"]
LEVELS: dict[Level, str] = {
    "proved": "follows from arithmetic or from a theorem",
    "measured here": "one of our experiments found it, with the interval given",
    "published only": "another paper or common practice; not tested here, or tested "
    "without an answer",
    "contradicted here": "one of our experiments found otherwise; the value follows it",
}


class MeasuredEffect(NamedTuple):
    """A number that our experiments found, with its 95 % interval."""

    found: float
    low: float
    high: float
    form: str = "{0} nats [{1}, {2}]"

    def __str__(self) -> str:
        numbers = (self.found, self.low, self.high)
        return self.form.format(*(f"{x:+.3f}" for x in numbers))


# docs/results/exponents: pre-LN, width 32, 24 steps, five seeds. A test compares.
_POWER = "N^({0} [{1}, {2}])"
LARGEST_GAIN = {
    "standard": MeasuredEffect(found=0.0842, low=0.0113, high=0.157, form=_POWER),
    "shared": MeasuredEffect(found=0.26, low=0.18, high=0.341, form=_POWER),
    "linear": MeasuredEffect(found=0.205, low=-0.123, high=0.534, form=_POWER),
}
"""Attention → how the largest gain that trains moves with depth N; N^(-1/m) is outside
all three intervals."""

# docs/results/prepost: 24 layers, width 64, 240 steps, five seeds. A test compares.
DEEPNORM_MINUS_PRE = MeasuredEffect(found=-0.0874, low=-0.102, high=-0.0726)
DEEPNORM_MINUS_POST = MeasuredEffect(found=-0.659, low=-0.676, high=-0.642)
DEEPNORM = (
    f"docs/results/prepost: held-out loss {DEEPNORM_MINUS_PRE} against pre-LN and "
    f"{DEEPNORM_MINUS_POST} against post-LN, 24 layers, all gains 1"
)
# docs/results/temperature: five seeds at three rates. A test compares.
WARMUP = (
    "docs/results/temperature: undecided here; with a warm-up the loss depends on the "
    "learning rate by -0.032 nats [-0.077, +0.013] less or more in post-LN, -0.006 "
    "[-0.037, +0.024] in pre-LN"
)
TEMPERATURE = (
    "docs/results/temperature: moves the held-out loss by at most 0.014 nats against "
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
    "llama-7b": "their model.py (meta-llama/llama at 0504cf4), read: scale, SwiGLU "
    "width 2/3·4d up to a multiple of 256, RMSNorm before each sublayer, no residual "
    "multiplier; it loads weights and draws none. From others who quote them: 2000 "
    "steps of warm-up (Touvron et al. 2023, arXiv 2302.13971, §2.3) and ε of the 7B "
    "weights' params.json (model.py's default is 1e-5). The 0.02 of converted "
    "checkpoints is the converter's default, not theirs",
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
