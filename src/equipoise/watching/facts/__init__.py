"""Facts of the loop: one reader for each section of the card; they never judge."""

from collections.abc import Callable

from equipoise.probes.protocols import FactProbe
from equipoise.watching.facts.batch import BatchFacts
from equipoise.watching.facts.experts import ExpertFacts
from equipoise.watching.facts.forward import ForwardFacts
from equipoise.watching.facts.loss import LossFacts
from equipoise.watching.facts.model import ModelFacts
from equipoise.watching.facts.setup import SetupFacts

READERS: tuple[Callable[[], FactProbe], ...] = (
    ModelFacts,
    LossFacts,
    BatchFacts,
    ForwardFacts,
    ExpertFacts,
    SetupFacts,
)
"""What makes the readers of one watched model, in the order of the card."""


def fact_probes() -> list[FactProbe]:
    """Return the readers of the loop's facts, new."""
    return [make() for make in READERS]
