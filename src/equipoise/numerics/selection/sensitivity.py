"""How far weights move per unit change of the logits, at a finite step (Algorithm 5).

Axes, in this file:  x any leading axes · K key.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import Normaliser, rows
from equipoise.numerics.normalisers.exponential import Softmax


class StepSensitivity(NamedTuple):
    """g along a random direction of each row, and what no direction can exceed."""

    value: Float[Tensor, "*x"]
    bound: float
    """min{Lip/T, √2/ε}: softmax 1/(2T). inf for rivals without a constant."""


def step_bound(
    temperature: float, step: float, *, constant: float = 0.5, diameter: float = 2**0.5
) -> float:
    """Return the largest g(T, ε): min{½/T, √2/ε}, both constants for softmax.

    The paper's Corollary 3 has min{¼/T, √2}: ¼ bounds single entries of the Jacobian,
    and the diameter of the simplex has to be divided by the step.

    Example:
        >>> step_bound(0.01, 1e-3), step_bound(0.01, 10.0)
        (50.0, 0.1414213562373095)
    """
    if not (temperature > 0 and step > 0):
        raise InputError(f"temperature {temperature}, step {step}: give positive ones")
    return min(constant / temperature, diameter / step)


def step_sensitivity(
    scores: Float[Tensor, "*x K"],
    *,
    step: float,
    generator: torch.Generator,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normaliser: Normaliser | None = None,
) -> StepSensitivity:
    """Return g = ‖α((l + εv)/T) − α(l/T)‖/ε for one random unit v per row.

    v points at visible keys only. A random direction finds about ‖J‖_F/√n, far below
    the worst case ‖J‖₂ (see ``softmax_jacobian_norm``): read g as the typical row.
    Computed in float64, where a step of 1e-3 leaves enough digits.

    Args:
        scores: As the temperature expects them: the paper's T divides q·k itself, our
            τ divides scores that include 1/√d_h.
        step: ε, the length of the change.
        generator: A CPU generator; the global one is never drawn from.
        temperature: T.
        mask: True where a key is visible.
        normaliser: Softmax unless given.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> found = step_sensitivity(torch.zeros(2), step=1e-3, generator=rng)
        >>> bool(found.value <= found.bound)
        True
    """
    rule = normaliser or Softmax()
    given = rows(scores.double(), mask=mask, temperature=temperature)
    v_xK = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    v_xK = given.only_seen(v_xK.to(scores.device))
    v_xK = torch.nn.functional.normalize(v_xK, dim=-1)
    moved = rows(scores.double() + step * v_xK, mask=mask, temperature=temperature)
    change_xK = rule.weights(moved) - rule.weights(given)
    most = int(given.n_x1.max()) if given.n_x1.numel() else 1
    constant = rule.lipschitz(max(most, 2)).two
    diameter = 2**0.5 if rule.sums_to_one else math.inf
    bound = step_bound(temperature, step, constant=constant, diameter=diameter)
    return StepSensitivity(change_xK.norm(dim=-1) / step, bound)
