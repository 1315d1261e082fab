"""Attention rows taken apart so that saturated ones keep their digits.

Axes, in this file:  x any leading axes · K key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.numerics.balance_ladder import checked, mass_tolerance


class Rows(NamedTuple):
    """Rows as their largest entry and the rest, normalised; NaN where unreadable."""

    top_x: Tensor
    """p₍₁₎"""
    away_x: Tensor
    """1 − p₍₁₎, summed and never subtracted: 1 − 0.99999999 is 0 in float32."""
    rest_xK: Tensor
    """p with one largest entry set to 0."""
    at_x1: Tensor
    """Where that entry was."""

    @property
    def second_x(self) -> Tensor:
        return self.rest_xK.amax(-1)

    @property
    def p_xK(self) -> Tensor:
        """The whole row again, its largest entry first."""
        return torch.cat([self.top_x[..., None], self.rest_xK], -1)

    @property
    def complement_xK(self) -> Tensor:
        """1 − p, in the order of ``p_xK``."""
        others_xK = self.top_x[..., None] + (self.away_x[..., None] - self.rest_xK)
        return torch.cat([self.away_x[..., None], others_xK], -1)


def taken_apart(p_xK: Tensor, *, least: torch.dtype = torch.float32) -> Rows:
    """Return the rows in at least the dtype ``least``; NaN if not probabilities.

    Negative entries, NaN, or a sum off 1 by more than the dtype explains: an
    instrument must not turn a broken row into a plausible number.
    """
    given_xK = checked(p_xK)
    p_xK = given_xK.to(torch.promote_types(given_xK.dtype, least))
    top_x1, at_x1 = p_xK.max(-1, keepdim=True)
    rest_xK = p_xK.scatter(-1, at_x1, 0.0)
    total_x1 = top_x1 + rest_xK.sum(-1, keepdim=True)
    off = mass_tolerance(given_xK.dtype, given_xK.shape[-1])
    readable = ((total_x1 - 1).abs() <= off) & (p_xK >= 0).all(-1, keepdim=True)
    total_x1 = torch.where(readable, total_x1, torch.nan)
    rest_xK = rest_xK / total_x1
    return Rows((top_x1 / total_x1)[..., 0], rest_xK.sum(-1), rest_xK, at_x1)
