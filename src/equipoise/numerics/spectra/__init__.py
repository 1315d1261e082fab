"""Spectral norms, extreme eigenvalues, traces and densities, with certificates."""
