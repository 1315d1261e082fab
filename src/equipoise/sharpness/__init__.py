"""How sharp a loss is at a model's weights, and whether the step size allows it."""

from equipoise.numerics.edge_of_stability import adam_threshold, sgd_threshold
from equipoise.sharpness.attribution import (
    Attribution,
    attributed,
    trace_attributed,
)
from equipoise.sharpness.edge import Edge, edge_of_stability, preconditioned, scale_of
from equipoise.sharpness.operator import Operator, gauss_newton, hessian
from equipoise.sharpness.spectrum import (
    density,
    eigenvalues,
    extreme_eigenvalues,
    trace,
)

__all__ = [
    "Attribution",
    "Edge",
    "Operator",
    "adam_threshold",
    "attributed",
    "density",
    "edge_of_stability",
    "eigenvalues",
    "extreme_eigenvalues",
    "gauss_newton",
    "hessian",
    "preconditioned",
    "scale_of",
    "sgd_threshold",
    "trace",
    "trace_attributed",
]
