"""Petrov's Fig. 6 with what it lacks: a null, a place away from w*, and a law.

Axes, in this file:  S sample · O order of the samples · N parameter.

At w* the Hessian term of the paper's bound is identically zero, so a slope measured
there tests nothing about curvature. Here the same differences are measured at the
trained weights, along the sharpest direction and along a random one, each beside
i.i.d. numbers in the same orders.
"""

import math

import torch
from torch import Tensor, nn

from equipoise.auditing.curvature import eigenvalues, hessian
from equipoise.auditing.curvature.loss_differences import (
    difference_on,
    moved,
    sample_losses,
)
from equipoise.errors import InputError
from equipoise.lab.data import Batches
from equipoise.lab.studies.judges import Trained
from equipoise.numerics.spectra.estimate import Search
from equipoise.theory.loss_difference import (
    expected_square,
    log_slope,
    loss_differences,
    sufficient_samples,
)

SAMPLES = 384
ORDERS = 100
FIRST, LAST = 16, 256
"""Between which k the slope is read."""
RISE = 0.5
"""How far along the sharpest direction: where a quadratic would rise by this much."""
FAR = 0.3
"""How far along a random direction, as a share of ‖w‖: sharp ones are rare there."""
BATCH = 128
"""Samples whose Hessian gives the directions."""
TARGET = 1e-3
"""Nats: the difference that k* is given for."""
SIGMA, SUBSPACE, DRAWS = 1e-2, 3, 48


def convergence(trained: Trained) -> dict[str, float]:
    """Return slopes, laws and terms of 𝓛_{k+1} − 𝓛_k for one trained model."""
    if trained.seen is None:
        raise InputError("convergence reads the data a model was trained on")
    model = trained.model.double()
    x, y = _samples(trained.seen)
    x = x.double() if x.is_floating_point() else x
    operator = hessian(model, (x[:BATCH], y[:BATCH]))
    top = eigenvalues(operator, SUBSPACE, search=Search(tolerance=0.05, at_most=60))
    sharp = top[0].vector
    assert sharp is not None
    reach = math.sqrt(2 * RISE / max(top[0].value, 1e-9))
    random_N = operator.start(torch.Generator().manual_seed(1))
    size = math.sqrt(sum(float((p**2).sum()) for p in operator.at))
    random_N = random_N * (FAR * size / random_N.norm())
    found = {
        "sharpness_plain": top[0].value,
        "gradient_norm": float(operator.gradient().norm()),
        "distance": reach,
        "slope_null": _slope(_null(len(y))),
    }
    places = {"at": None, "sharp": reach * sharp, "random": random_N}
    for name, v_N in places.items():
        losses_S = _losses(model, (x, y), v_N)
        found |= {f"{key}_{name}": v for key, v in _laws(losses_S).items()}
    found |= _terms(model, (x, y), reach * sharp)
    basis_DN = torch.stack([e.vector for e in top if e.vector is not None])
    return found | _subspace(model, (x, y), basis_DN)


def _samples(data: Batches) -> tuple[Tensor, Tensor]:
    x, y = data.take()
    while len(y) < SAMPLES:
        more_x, more_y = data.take()
        x, y = torch.cat([x, more_x]), torch.cat([y, more_y])
    return x[:SAMPLES], y[:SAMPLES]


def _losses(
    model: nn.Module, batch: tuple[Tensor, Tensor], v_N: Tensor | None
) -> Tensor:
    return sample_losses(model, batch, move=None if v_N is None else moved(model, v_N))


def _null(samples: int) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return torch.rand(samples, generator=rng, dtype=torch.float64)


def _orders(samples: int) -> Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(samples, generator=rng) for _ in range(ORDERS)])


def _slope(losses_S: Tensor) -> float:
    """Return the log–log slope of the mean of \\|𝓛_{k+1} − 𝓛_k\\| over orders."""
    size_k = loss_differences(losses_S[_orders(len(losses_S))]).abs().mean(0)
    return log_slope(size_k, first=FIRST, last=LAST)


def _laws(losses_S: Tensor) -> dict[str, float]:
    square_k = (loss_differences(losses_S[_orders(len(losses_S))]) ** 2).mean(0)
    variance = float(losses_S.var())
    law = [
        float(square_k[k - 1]) / expected_square(variance, k)
        for k in range(FIRST, LAST)
    ]
    return {
        "slope": _slope(losses_S),
        "mean_loss": float(losses_S.mean()),
        "variance_law": math.fsum(law) / len(law),
        "k_star": sufficient_samples(variance, TARGET),
    }


def _terms(
    model: nn.Module, batch: tuple[Tensor, Tensor], v_N: Tensor
) -> dict[str, float]:
    """Return what makes ℓ_i − 𝓛 differ away from w*: spread of each Taylor term."""
    h = 1e-3
    zero_S, one_S, plus_S, minus_S = (
        _losses(model, batch, t * v_N) for t in (0.0, 1.0, h, -h)
    )
    slope_S = (plus_S - minus_S) / (2 * h)
    bend_S = (plus_S - 2 * zero_S + minus_S) / h**2 / 2
    rest_S = one_S - zero_S - slope_S - bend_S
    terms = {"value": zero_S, "slope": slope_S, "bend": bend_S, "rest": rest_S}
    total = math.fsum(float(t.var()) for t in terms.values())
    shares = {f"share_{n}": float(t.var()) / total for n, t in terms.items()}
    return shares | _bounds(terms, one_S)


def _bounds(terms: dict[str, Tensor], one_S: Tensor) -> dict[str, float]:
    """Return how often the paper's bound fails here, kindest M, and how loose ours is.

    Ours: the terms of the expansion along this line, remainder included. The paper's:
    2Λ plus the curvature term, with the largest curvature of any sample as M.
    """
    truth_S = (one_S - one_S.mean()).abs()
    gaps = [(t - t.mean()).abs() for t in terms.values()]
    ours_S = torch.stack(gaps).sum(0)
    paper = 2 * float(terms["value"].max()) + 2 * float(terms["bend"].abs().max())
    return {
        "paper_fails": float((truth_S > paper).double().mean()),
        "paper_ratio": float((paper / truth_S).median()),
        "ours_fails": float((truth_S > ours_S * (1 + 1e-9)).double().mean()),
        "ours_ratio": float((ours_S / truth_S).median()),
    }


def _subspace(
    model: nn.Module, batch: tuple[Tensor, Tensor], basis_DN: Tensor
) -> dict[str, float]:
    """Return Δ₂ on the top eigenspace: the closed form over what sampling gives."""
    x, y = batch
    old, new = (x[:BATCH], y[:BATCH]), (x[BATCH : BATCH + 1], y[BATCH : BATCH + 1])
    closed = difference_on(model, old, new, basis_DN=basis_DN).delta_two(SIGMA)
    rng, squares = torch.Generator().manual_seed(4), []
    for _ in range(DRAWS):
        z_D = torch.randn(len(basis_DN), generator=rng, dtype=torch.float64)
        both = x[: BATCH + 1], y[: BATCH + 1]
        each_S = _losses(model, both, SIGMA * z_D @ basis_DN)
        squares.append(float(each_S.mean() - each_S[:BATCH].mean()) ** 2)
    return {"delta2_ratio": closed / (math.fsum(squares) / DRAWS)}
