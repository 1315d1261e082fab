"""Learning rate against curvature: beyond what (preconditioned) sharpness allows."""

from equipoise.forecast.history import History
from equipoise.forecast.rules.registry import Measured, measured, rule

EDGE = "curvature.edge_ratio"


@rule(
    "curvature.beyond_edge",
    reads=EDGE,
    above=2.0,
    release=1.2,
    persist=3,
    preset="deep",
    scope="model",
    source="healthy runs sit at 1 (arXiv 2207.14484), so a level means nothing below "
    "2; sustained excess means overshoot",
    message="the learning rate is {value:.2g} times what the sharpness allows",
    remedies=("learning_rate", "group_learning_rates"),
)
def beyond_edge(history: History) -> Measured | None:
    """(Preconditioned) sharpness over the optimiser's threshold, after warm-up."""
    value = history.scalar(EDGE)
    return None if value is None or history.sampled < 10 else measured(value)
