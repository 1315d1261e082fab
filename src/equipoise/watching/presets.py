"""Which probes each preset puts on: one line per probe, cheapest preset first.

Each entry makes a new probe, because a probe keeps the state of one watched model. The
argument is over how many ranks its values will be put together.
"""

from collections.abc import Callable

from equipoise.probes.attention import AttentionRows
from equipoise.probes.backward import BackwardFactors
from equipoise.probes.capture import Probe
from equipoise.probes.curvature import Sharpness
from equipoise.probes.gain import HeadProducts, ProjectionGain
from equipoise.probes.gradients import GradientNorms
from equipoise.probes.lipschitz import LocalLipschitz
from equipoise.probes.logits import OutputLogits
from equipoise.probes.magnitudes import Magnitudes
from equipoise.probes.normalisers import NormScales
from equipoise.probes.precision import NumericalFragility
from equipoise.probes.router import RouterLoad
from equipoise.probes.selection import HeadSelection
from equipoise.probes.stream import StreamShape
from equipoise.probes.updates import AdamUpdates

Maker = Callable[[int], Probe]

MINIMAL: tuple[Maker, ...] = (
    lambda ranks: AttentionRows(ranks=ranks),
    lambda ranks: GradientNorms(ranks=ranks),
)
DEFAULT: tuple[Maker, ...] = (
    *MINIMAL,
    lambda ranks: ProjectionGain(ranks=ranks),
    lambda ranks: Magnitudes(),
    lambda ranks: NormScales(),
    lambda ranks: StreamShape(),
    lambda ranks: BackwardFactors(),
    lambda ranks: AdamUpdates(ranks=ranks),
    lambda ranks: RouterLoad(),
    lambda ranks: OutputLogits(),
)
DEEP: tuple[Maker, ...] = (
    *DEFAULT,
    lambda ranks: HeadProducts(),
    lambda ranks: LocalLipschitz(ranks=ranks),
    lambda ranks: HeadSelection(),
    lambda ranks: NumericalFragility(ranks=ranks),
    lambda ranks: Sharpness(),
)

PRESETS: dict[str, tuple[Maker, ...]] = {
    "minimal": MINIMAL,
    "default": DEFAULT,
    "deep": DEEP,
}


def probes(preset: str, *, ranks: int = 1) -> list[Probe]:
    """Return the probes of a preset, new."""
    return [make(ranks) for make in PRESETS[preset]]
