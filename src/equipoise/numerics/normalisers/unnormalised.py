"""Rivals whose weights need not sum to 1: sigmoid, softpick, self-adjusted softmax.

Axes, in this file:  x any leading axes · K key.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.numerics.normalisers.interface import Interval, Lipschitz, LowRank, Rows
from equipoise.numerics.normalisers.sensitivity import low_rank_theta


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """σ(z + b) with b = −ln n (arXiv 2409.04431): keys do not compete."""

    name: str = "sigmoid"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        return given.only_seen(
            torch.sigmoid(given.z_xK - given.n_x1.clamp_min(1).log())
        )

    def jacobian(self, given: Rows) -> LowRank:
        w = self.weights(given)
        none = torch.zeros_like(w).unsqueeze(0)
        return LowRank(w * (1 - w), none, none)

    def theta(self, given: Rows) -> Interval:
        total = self.jacobian(given).d_xK.double().sum(-1)
        return Interval(total, total)

    def lipschitz(self, n: int) -> Lipschitz:
        return Lipschitz(two=0.25, infinity_to_one=n / 4)


@dataclass(frozen=True, slots=True)
class Softpick:
    """relu(e^z − 1) / (Σ|e^z − 1| + ε): rectified softmax (arXiv 2504.20966).

    The shift is max(z, 0): e^(−max z) overflows when every score is very low. The
    Jacobian is unbounded as z → 0.
    """

    epsilon: float = 1e-6
    name: str = "softpick"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        _, difference, total = self._parts(given)
        return given.only_seen(difference.clamp_min(0)) / total

    def _parts(self, given: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return e^z, e^z − 1 and the denominator, all times e^(−shift)."""
        shift = given.z_xK.amax(-1, keepdim=True).clamp_min(0).detach()
        grown = torch.exp(given.z_xK - shift)
        difference = (
            torch.expm1(given.z_xK) if shift.numel() == 0 else grown - torch.exp(-shift)
        )
        # Near z = 0 the difference of two near-equal exponentials has no digits left.
        difference = torch.where(
            given.z_xK.abs() < 1,
            torch.expm1(given.z_xK.clamp(-1, 1)) * torch.exp(-shift),
            difference,
        )
        total = given.only_seen(difference.abs()).sum(-1, keepdim=True)
        return grown, difference, total + self.epsilon * torch.exp(-shift)

    def jacobian(self, given: Rows) -> LowRank:
        grown, difference, total = self._parts(given)
        w = given.only_seen(difference.clamp_min(0)) / total
        slope = given.only_seen(grown) / total
        right = slope * difference.sign()
        return LowRank(slope * (difference > 0), w.unsqueeze(0), right.unsqueeze(0))

    def theta(self, given: Rows) -> Interval:
        return low_rank_theta(self.jacobian(given))

    def lipschitz(self, n: int) -> Lipschitz:
        return Lipschitz(two=math.inf, infinity_to_one=math.inf)


@dataclass(frozen=True, slots=True)
class SelfAdjusted:
    """z ⊙ softmax(z), as published (SA-Softmax, arXiv 2502.18277).

    Weights may be negative, do not sum to 1 and change under a common shift; the
    Jacobian grows without bound: (1 + c)/2 at z = (c, c).
    """

    name: str = "self-adjusted"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        z = given.only_seen(given.z_xK)
        return z * given.only_seen(given.z_xK.softmax(-1))

    def jacobian(self, given: Rows) -> LowRank:
        p, z = given.only_seen(given.z_xK.softmax(-1)), given.only_seen(given.z_xK)
        return LowRank(p * (1 + z), (p * z).unsqueeze(0), p.unsqueeze(0))

    def theta(self, given: Rows) -> Interval:
        return low_rank_theta(self.jacobian(given))

    def lipschitz(self, n: int) -> Lipschitz:
        if n < 2:  # one key: the weight is z itself
            return Lipschitz(two=1.0, infinity_to_one=1.0)
        return Lipschitz(two=math.inf, infinity_to_one=math.inf)


@dataclass(frozen=True, slots=True)
class SafeSelfAdjusted:
    """(z − m + η)/(R + η) ⊙ softmax(z), m = min(z, 0), R = max(z, 0) − m: ours.

    The published normalised form has η = 0: its Jacobian is unbounded as R → 0 and it
    is 0/0 at z = 0. With η it reduces to softmax there. ‖J‖₂ ≤ ½ + (1+√2)/η and
    ‖J‖_{∞→1} ≤ 1 + 2/η (proved in the docs page).
    """

    eta: float = 1.0
    name: str = "self-adjusted-safe"
    sums_to_one: bool = False

    def weights(self, given: Rows) -> Tensor:
        a, _ = self._slopes(given)
        return a * given.only_seen(given.z_xK.softmax(-1))

    def _slopes(self, given: Rows) -> tuple[Tensor, Tensor]:
        """Return the factor a, and R + η; hidden keys count as 0, as m and M do."""
        z = given.only_seen(given.z_xK)
        low = z.amin(-1, keepdim=True).clamp_max(0)
        span = z.amax(-1, keepdim=True).clamp_min(0) - low + self.eta
        return (z - low + self.eta) / span, span

    def jacobian(self, given: Rows) -> LowRank:
        p = given.only_seen(given.z_xK.softmax(-1))
        z = given.only_seen(given.z_xK)
        a, span = self._slopes(given)
        top = torch.zeros_like(z).scatter(-1, z.argmax(-1, keepdim=True), 1.0)
        least = torch.zeros_like(z).scatter(-1, z.argmin(-1, keepdim=True), 1.0)
        top = top * (z.amax(-1, keepdim=True) > 0)
        least = least * (z.amin(-1, keepdim=True) < 0)
        left = torch.stack([a * p, a * p / span, (1 - a) * p / span])
        return LowRank(a * p + p / span, left, torch.stack([p, top, least]))

    def theta(self, given: Rows) -> Interval:
        z = given.only_seen(given.z_xK)
        pinned = torch.stack([z.argmax(-1), z.argmin(-1)], -1)
        return low_rank_theta(self.jacobian(given), pinned=pinned)

    def lipschitz(self, n: int) -> Lipschitz:
        two = 0.5 + (1 + math.sqrt(2)) / self.eta
        return Lipschitz(two=two, infinity_to_one=1 + 2 / self.eta, attained=False)
