"""What each experiment says, by its name; one without a finder gets its table."""

from equipoise.lab.evidence import Evidence
from equipoise.lab.findings.convergence import convergence
from equipoise.lab.findings.curvature import curvature
from equipoise.lab.findings.depth import sharpening, vanishing
from equipoise.lab.findings.exponents import exponents
from equipoise.lab.findings.finding import Finder, Finding, Grid, plain
from equipoise.lab.findings.fragility import fragility
from equipoise.lab.findings.prepost import prepost
from equipoise.lab.findings.rates import rates
from equipoise.lab.findings.selection import selection
from equipoise.lab.findings.selection_paper import selection_paper
from equipoise.lab.findings.theorem import theorem
from equipoise.lab.findings.variants import variants
from equipoise.lab.findings.warmup import temperature

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
