"""How much weight a row can put anywhere, from the range of its logits alone.

Axes, in this file:  x any leading axes · K key. n visible keys, ρ = (l_max − l_min)/T.

How far weights move per unit change of the logits, at a finite step (Algorithm 5).

Axes, in this file:  x any leading axes · K key.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.normalisers import Normaliser, rows
from equipoise.numerics.normalisers.closed_form import Softmax


class ConcentrationInterval(NamedTuple):
    """Proven bounds."""

    lower: Float[Tensor, "*x"]
    upper: Float[Tensor, "*x"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concentration:
    """Where a row stands between flat and a single key; NaN in a row of NaN.

    A row that sees no key reads 0 everywhere, but NaN for what divides by n.
    """

    visible: Float[Tensor, "*x"]
    rho: Float[Tensor, "*x"]
    """Range of the visible logits over T."""
    p_max: Float[Tensor, "*x"]
    weight: ConcentrationInterval
    """Lemma 1, tight: where every weight of a softmax row of this ρ and n must lie."""
    entropy: Float[Tensor, "*x"]
    """In nats, of the weights over their total."""
    entropy_floor: Float[Tensor, "*x"]
    """max(0, ln n − ρ): softmax cannot be more decided than this."""

    @property
    def evenness(self) -> Float[Tensor, "*x"]:
        """e^H/n: the share of the visible keys that effectively count; 1 is flat."""
        return self.entropy.exp() / self.visible


def logit_range(
    scores: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "*x"]:
    """Return ρ = (l_max − l_min)/T over the visible keys; 0 where there is none.

    Example:
        >>> logit_range(torch.tensor([1.0, 4.0, -torch.inf]), temperature=2.0)
        tensor(1.5000)
    """
    given = rows(scores, mask=mask, temperature=temperature)
    dark_x = given.n_x1[..., 0] == 0
    top_x = given.z_xK.amax(-1)
    low_x = given.z_xK.masked_fill(given.hidden_xK, torch.inf).amin(-1)
    return (top_x - low_x).masked_fill(dark_x, 0.0)


def weight_interval(
    rho: Float[Tensor, "*x"], visible: Float[Tensor, "*x"]
) -> ConcentrationInterval:
    """Return Lemma 1 with its best constants: 1/(1+(n−1)e^ρ) ≤ α ≤ 1/(1+(n−1)e^−ρ).

    For α = F(l)/ΣF(l) with any positive F, ρ = ln(max F/min F); for softmax it is the
    range of the logits over T, and at most 2‖q‖max‖k‖/T. Both ends are attained: one
    logit at one end of the range, all others at the other.

    Example:
        >>> weight_interval(torch.tensor(0.0), torch.tensor(4.0))
        ConcentrationInterval(lower=tensor(0.2500), upper=tensor(0.2500))
    """
    others = visible - 1
    return ConcentrationInterval(
        1 / (1 + others * rho.exp()), 1 / (1 + others * (-rho).exp())
    )


def entropy_floor(
    rho: Float[Tensor, "*x"], visible: Float[Tensor, "*x"]
) -> Float[Tensor, "*x"]:
    """Return max(0, ln n − ρ): a softmax row of range ρ has at least this entropy.

    H = ln Σe^z − Σp z ≥ (ln n + z_min) − z_max.

    Example:
        >>> floor = entropy_floor(torch.tensor(1.0), torch.tensor(math.e**3))
        >>> round(float(floor), 4)
        2.0
    """
    return (visible.log() - rho).clamp_min(0.0)


def range_needed(visible: float, share: float = 0.5) -> float:
    """Return the least ρ with which one of n keys can hold a share c: ln((n−1)c/(1−c)).

    Example:
        >>> [round(range_needed(n, c), 2) for n, c in ((1024, 0.5), (32768, 0.9))]
        [6.93, 12.59]
    """
    if not 0 < share < 1 or visible < 1:
        raise InputError(f"share {share} of {visible} keys: give 0 < share < 1, n ≥ 1")
    odds = (visible - 1) * share / (1 - share)
    return math.log(odds) if odds > 1 else 0.0


def concentration(
    scores: Float[Tensor, "*x K"],
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    normaliser: Normaliser | None = None,
    weights: Float[Tensor, "*x K"] | None = None,
) -> Concentration:
    """Return ρ, entropy, the largest weight, and what ρ alone allows, row by row.

    Args:
        scores: Include the model's scale; -inf hides a key.
        mask: True where a key is visible.
        temperature: τ, which divides the scores; the paper's T is τ√d_h.
        normaliser: Softmax unless given. The bounds from ρ are softmax's; beside a
            rival they say what softmax could have done with the same logits.
        weights: Where they are known already, hidden keys at 0.

    Example:
        >>> concentration(torch.zeros(1, 8)).evenness.round(decimals=4)
        tensor([1.])
    """
    given = rows(scores, mask=mask, temperature=temperature)
    if weights is None:
        weights = (normaliser or Softmax()).weights(given)
    rho_x = logit_range(scores, mask=mask, temperature=temperature)
    n_x = given.n_x1[..., 0]
    return Concentration(
        visible=n_x,
        rho=rho_x,
        p_max=weights.amax(-1),
        weight=weight_interval(rho_x, n_x),
        entropy=weights_entropy(weights),
        entropy_floor=entropy_floor(rho_x, n_x),
    )


def weights_entropy(weights: Float[Tensor, "*x K"]) -> Float[Tensor, "*x"]:
    """Return H of the weights over their total, in nats; 0 for a row of zeros.

    Example:
        >>> round(float(weights_entropy(torch.full((4,), 0.25)).exp()), 4)
        4.0
    """
    total_x1 = weights.sum(-1, keepdim=True)
    share_xK = weights / total_x1.masked_fill(total_x1 == 0, 1.0)
    entropy_x: Tensor = -torch.special.xlogy(share_xK, share_xK).sum(-1)
    return entropy_x


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
