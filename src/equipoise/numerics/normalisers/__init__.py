"""Softmax and its rivals under one interface. Parameters are arguments; no modules."""

from collections.abc import Callable

from equipoise.numerics.normalisers.closed_form import (
    AdaptiveTemperature,
    SafeSelfAdjusted,
    ScalableSoftmax,
    SelfAdjusted,
    Sigmoid,
    SinkSoftmax,
    Softmax,
    Softpick,
)
from equipoise.numerics.normalisers.interface import (
    Lipschitz,
    LowRank,
    Normaliser,
    Rows,
    attention_weights,
    jvp,
    rows,
)
from equipoise.numerics.normalisers.sparse import Entmax, ScalableEntmax

__all__ = [
    "NORMALISERS",
    "Lipschitz",
    "LowRank",
    "Normaliser",
    "Rows",
    "attention_weights",
    "jvp",
    "rows",
]

NORMALISERS: dict[str, Callable[[], Normaliser]] = {
    "softmax": Softmax,
    "ssmax": ScalableSoftmax,
    "sparsemax": lambda: Entmax(2.0, name="sparsemax"),
    "entmax15": lambda: Entmax(1.5, name="entmax15"),
    "entmax": lambda: Entmax(1.3),
    "asentmax": ScalableEntmax,
    "self-adjusted": SelfAdjusted,
    "self-adjusted-safe": SafeSelfAdjusted,
    "softmax1": SinkSoftmax,
    "sink": lambda: SinkSoftmax(-2.0, name="sink"),
    "sigmoid": Sigmoid,
    "softpick": Softpick,
    "adaptive-temperature": AdaptiveTemperature,
}
"""Each rival with its default parameters, by the name the lab and the CLI use."""
