"""``plan``: what to set before training a model of a given size, and why."""

from equipoise.planning.depth import (
    PLACEMENTS,
    epsilon,
    feedforward_width,
    scores,
    std,
    warmup_of,
)
from equipoise.planning.model import (
    ATTENTIONS,
    FEEDFORWARDS,
    NORMS,
    PRECISIONS,
    RESIDUALS,
    WARMUPS,
    Model,
    Plan,
    Setting,
)

__all__ = [
    "ATTENTIONS",
    "FEEDFORWARDS",
    "NORMS",
    "PRECISIONS",
    "RESIDUALS",
    "WARMUPS",
    "Model",
    "Plan",
    "Setting",
    "plan",
]


def plan(
    depth: int,
    width: int,
    heads: int,
    *,
    residual: str = "pre",
    attention: str = "standard",
    norm: str = "layernorm",
    precision: str = "bf16",
    warmup: str = "learning-rate",
    beta2: float = 0.95,
    feedforward: str = "plain",
    decoder_depth: int | None = None,
) -> Plan:
    """Return what to set before training such a model, with formula and reference.

    Args:
        depth: Layers N, each of an attention and a feed-forward branch.
        residual: pre, post, sandwich, deepnorm (LN(X + αf)), deepnorm-original
            (LN(aX + f)).
        attention: standard (m = 4 maps in the sensitive path), shared (W_Q = W_K, 3),
            linear (2).
        precision: The format the normalisers compute in; fp32 under autocast.
        warmup: Of the learning rate, or of the softmax temperature.
        feedforward: plain, or gated (SwiGLU).
        decoder_depth: For an encoder–decoder; ``depth`` is the encoder then.

    Example:
        >>> plan(8, 512, 8, residual="deepnorm-original")["residual.skip"]
        2.0
        >>> plan(16, 64, 4, precision="fp16")["norm.eps"]
        0.0001
    """
    model = Model(
        depth=depth,
        width=width,
        heads=heads,
        residual=residual,
        attention=attention,
        norm=norm,
        precision=precision,
        warmup=warmup,
        beta2=beta2,
        feedforward=feedforward,
        decoder_depth=decoder_depth,
    )
    parts = (
        *(scores, std, feedforward_width, PLACEMENTS[residual]),
        *(warmup_of, epsilon),
    )
    return Plan(model=model, settings=tuple(s for part in parts for s in part(model)))
