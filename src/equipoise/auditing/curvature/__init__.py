"""How sharp a loss is at a model's weights, and whether the step size allows it."""

from equipoise.auditing.curvature.attribution import (
    Attribution,
    attributed,
    trace_attributed,
)
from equipoise.auditing.curvature.operator import Operator, gauss_newton, hessian
from equipoise.auditing.curvature.spectrum import (
    Edge,
    density,
    edge_of_stability,
    eigenvalues,
    extreme_eigenvalues,
    preconditioned,
    scale_of,
    trace,
)
from equipoise.numerics.edge_of_stability import adam_threshold, sgd_threshold

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
