"""What each experiment says, by its name; one without a finder gets its table."""

from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.finding import Finder, Finding, Grid, plain
from equipoise.lab.studies.convergence.finding import convergence
from equipoise.lab.studies.curvature.finding import curvature
from equipoise.lab.studies.depth import sharpening, vanishing
from equipoise.lab.studies.exponents import exponents
from equipoise.lab.studies.fragility.finding import fragility
from equipoise.lab.studies.prepost.finding import prepost
from equipoise.lab.studies.rates import rates
from equipoise.lab.studies.selection.finding import selection
from equipoise.lab.studies.selection.finding_paper import selection_paper
from equipoise.lab.studies.temperature import temperature
from equipoise.lab.studies.theorem import theorem
from equipoise.lab.studies.variants import variants

__all__ = ["FINDERS", "Finding", "Grid", "finding"]

FINDERS: dict[str, Finder] = {
    "prepost": prepost,
    "demo": prepost,
    "temperature": temperature,
    "exponents": exponents,
    "rmsnorm": variants,
    "experts": variants,
    "sharpening": sharpening,
    "vanishing": vanishing,
    "rates": rates,
    "theorem": theorem,
    "selection": selection,
    "selection-paper": selection_paper,
    "fragility": fragility,
    "convergence": convergence,
    "curvature": curvature,
}


def finding(evidence: Evidence) -> Finding:
    """Return what the evidence says."""
    return FINDERS.get(evidence.name.removesuffix("-quick"), plain)(evidence)
