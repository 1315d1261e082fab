"""Spectral norms, extreme eigenvalues, traces and densities, with certificates."""

from equipoise.numerics.spectra.estimate import Estimate, Search, Status
from equipoise.numerics.spectra.extremes import Extremes, extremes
from equipoise.numerics.spectra.norm import spectral_norm, spectral_norms
from equipoise.numerics.spectra.trace import hutch_plus_plus, hutchinson
from equipoise.numerics.spectra.tracking import fixed_steps, tracked_norm

__all__ = [
    "Estimate",
    "Extremes",
    "Search",
    "Status",
    "extremes",
    "fixed_steps",
    "hutch_plus_plus",
    "hutchinson",
    "spectral_norm",
    "spectral_norms",
    "tracked_norm",
]
