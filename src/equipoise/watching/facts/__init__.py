"""Facts of the loop: one reader for each section of the card; they never judge."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from equipoise.probes.protocols import FactProbe
from equipoise.watching.facts.batch import BatchFacts
from equipoise.watching.facts.clipping import ClippingFacts, ScalerFacts
from equipoise.watching.facts.experts import ExpertFacts
from equipoise.watching.facts.forward import ForwardFacts
from equipoise.watching.facts.influence import InfluenceFacts
from equipoise.watching.facts.loop_record import LoopRecord
from equipoise.watching.facts.loss import LossFacts
from equipoise.watching.facts.model import ModelFacts
from equipoise.watching.facts.optimizers import OptimizerFacts
from equipoise.watching.facts.reach import ReachFacts
from equipoise.watching.facts.replicas import ReplicaFacts
from equipoise.watching.facts.schedule import ScheduleFacts
from equipoise.watching.facts.setup import SetupFacts
from equipoise.watching.facts.start import StartFacts
from equipoise.watching.facts.weights import WeightFacts

READERS: tuple[Callable[[], FactProbe], ...] = (
    ModelFacts,
    LossFacts,
    BatchFacts,
    ForwardFacts,
    ExpertFacts,
    SetupFacts,
)
"""What makes the readers of one watched model, in the order of the card."""
OF_THE_LOOP: tuple[Callable[[LoopRecord], FactProbe], ...] = (
    WeightFacts,
    OptimizerFacts,
    ScheduleFacts,
    ClippingFacts,
    ScalerFacts,
    StartFacts,
    ReplicaFacts,
    ReachFacts,
)
"""Those that read off one record of the loop."""


def fact_probes(
    optimizers: Sequence[Optimizer] = (), *, active: bool = False
) -> list[Any]:
    """Return the readers of the loop's facts, new, and the record that some share.

    ``active``: influence is tried.
    """
    record = LoopRecord(named=[weakref.ref(one) for one in optimizers])
    readers = [make(record) for make in OF_THE_LOOP]
    others = [make() for make in READERS]
    return [record, *readers, *others, InfluenceFacts(active=active)]
