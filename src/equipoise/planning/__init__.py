"""``plan``: what to set before training a model of a given size, and why."""

from typing import Any

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
    CHOICES,
    FEEDFORWARDS,
    NORMS,
    PRECISIONS,
    RESIDUALS,
    WARMUPS,
    Model,
    Plan,
    PlanSetting,
)

__all__ = [
    "ATTENTIONS",
    "CHOICES",
    "FEEDFORWARDS",
    "NORMS",
    "PRECISIONS",
    "RESIDUALS",
    "WARMUPS",
    "Model",
    "Plan",
    "PlanSetting",
    "plan",
]


def plan(depth: int, width: int, heads: int, **options: Any) -> Plan:
    """Return what to set before training such a model, with formula and reference.

    Args:
        depth: Layers; of the encoder, where there is a decoder too.
        width: Of the residual stream.
        heads: Attention heads.
        options: The other fields of :class:`Model`, which lists what each takes.

    Example:
        >>> plan(8, 512, 8, residual="deepnorm-original")["residual.skip"]
        2.0
        >>> plan(16, 64, 4, precision="fp16")["norm.eps"]
        0.0001
    """
    model = Model(depth=depth, width=width, heads=heads, **options)
    parts = (
        *(scores, std, feedforward_width, PLACEMENTS[model.residual]),
        *(warmup_of, epsilon),
    )
    return Plan(model=model, settings=tuple(s for part in parts for s in part(model)))
