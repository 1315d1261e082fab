"""Dense truth for iterative spectra: NumPy's float64 decompositions."""

import numpy as np
import torch
from torch import Tensor


def spectral_norm(*factors: Tensor) -> float:
    """Return ‖A·B·…‖₂ of the product, formed."""
    product = np.linalg.multi_dot(
        [f.double().numpy() for f in (*factors, _one(factors))]
    )
    return float(np.linalg.norm(product, ord=2))


def _one(factors: tuple[Tensor, ...]) -> Tensor:
    return torch.eye(factors[-1].shape[1])


def with_spectrum(values: Tensor, rows: int, seed: int) -> Tensor:
    """Return a float64 matrix of ``rows`` rows with the given singular values."""
    rng = np.random.default_rng(seed)
    n = len(values)
    left = np.linalg.qr(rng.standard_normal((rows, n)))[0]
    right = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return torch.from_numpy((left * values.double().numpy()) @ right.T)
