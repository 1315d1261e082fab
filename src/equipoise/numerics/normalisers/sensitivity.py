"""θ beyond softmax: the ∞→1 norm of a normaliser's Jacobian, so that rivals compare.

Axes, in this file:  x any leading axes · K key · N row · C cell of m · P pinned key.

‖J‖_{∞→1} = max over signs s ∈ {±1}^K of ‖J s‖₁.
"""

import itertools

import torch
from torch import Tensor

from equipoise.numerics.normalisers.interface import Interval, LowRank
from equipoise.numerics.rows.balance import balance

# m = Σ v_k s_k is cut into this many cells; the upper bound tightens with their number.
CELLS = 64


def covariance_theta(g_xK: Tensor, *, factor: Tensor | None = None) -> Interval:
    """Return the norm of c·(diag(g) − g gᵀ/G), which is c·G·θ(g/G).

    J is positive semi-definite, so the best signs on both sides agree, and
    sᵀJs = G − (g(S) − g(Sᶜ))²/G = 4 g(S) g(Sᶜ)/G.
    """
    g_xK = g_xK.double()
    total_x1 = g_xK.sum(-1, keepdim=True)
    found = balance(torch.where(total_x1 > 0, g_xK / total_x1, _one_hot(g_xK)))
    size_x = total_x1.squeeze(-1)
    if factor is not None:
        size_x = size_x * factor.double().expand(total_x1.shape).squeeze(-1).abs()
    return Interval(size_x * found.lower, size_x * found.upper)


def sink_theta(w_xK: Tensor) -> Interval:
    """Return the norm of diag(w) − w wᵀ with a = Σw ≤ 1: a − a²(1 − θ(w/a)).

    Positive semi-definite again, and sᵀJs = a − (w(S) − w(Sᶜ))².
    """
    w_xK = w_xK.double()
    a_x1 = w_xK.sum(-1, keepdim=True)
    found = balance(torch.where(a_x1 > 0, w_xK / a_x1, _one_hot(w_xK)))
    a_x = a_x1.squeeze(-1)
    return Interval(a_x - a_x**2 * (1 - found.lower), a_x - a_x**2 * (1 - found.upper))


def low_rank_theta(jacobian: LowRank, *, pinned: Tensor | None = None) -> Interval:
    """Return bounds of ‖diag(d) − Σ_r u_r v_rᵀ‖_{∞→1} for any d, u, v.

    Beyond the first term, v_r must be supported on the pinned keys: their signs are
    tried one by one. What is left depends on the signs only through m = Σ v_k s_k.
    In a cell of m each |d_k s_k − u_k m + c_k| is convex in m: its value at the worse
    end bounds it. Choosing signs with m in the cell is then a knapsack, whose
    fractional optimum bounds the choice from above. Rounding that optimum gives signs
    that attain the lower bound.
    """
    shape = jacobian.d_xK.shape
    d_NK = jacobian.d_xK.double().reshape(-1, shape[-1])
    u_RNK, v_RNK = (
        x.double().reshape(len(x), *d_NK.shape)
        for x in (jacobian.u_RxK, jacobian.v_RxK)
    )
    keys_NP = (
        torch.zeros(len(d_NK), 0, dtype=torch.long, device=d_NK.device)
        if pinned is None
        else pinned.reshape(len(d_NK), -1)
    )
    bounds = [
        _with_pinned(
            d_NK, u_RNK, v_RNK, keys_NP, torch.tensor(signs, device=d_NK.device)
        )
        for signs in itertools.product((1.0, -1.0), repeat=keys_NP.shape[1])
    ]
    lower, upper = (
        torch.stack(side).amax(0).view(shape[:-1]) for side in zip(*bounds, strict=True)
    )
    return Interval(lower, upper)


def _one_hot(like_xK: Tensor) -> Tensor:
    """Return rows that stand in for those without mass; their total is 0 anyway."""
    first = torch.zeros_like(like_xK)
    first[..., 0] = 1.0
    return first


def _with_pinned(
    d_NK: Tensor, u_RNK: Tensor, v_RNK: Tensor, keys_NP: Tensor, signs_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (lower, upper) over all signs that agree with the pinned ones."""
    fixed_NK = torch.zeros_like(d_NK)
    for p in range(keys_NP.shape[1]):
        sign_N1 = signs_P[p].double().expand(len(d_NK), 1)
        fixed_NK = fixed_NK.scatter(1, keys_NP[:, p : p + 1], sign_N1)
    offset_NK = -torch.einsum("rnk,rn->nk", u_RNK[1:], (v_RNK[1:] * fixed_NK).sum(-1))
    # Turn each key so that v ≥ 0: only the product of its sign with v matters to m.
    turn_NK = torch.where(v_RNK[0] < 0, -1.0, 1.0)
    v_NK, d_NK, fixed_NK = v_RNK[0].abs(), d_NK * turn_NK, fixed_NK * turn_NK
    signs_NCK, upper_N = _by_cells(d_NK, u_RNK[0], v_NK, offset_NK, fixed_NK)
    m_NC1 = (v_NK[:, None] * signs_NCK).sum(-1, keepdim=True)
    terms = d_NK[:, None] * signs_NCK - u_RNK[0][:, None] * m_NC1 + offset_NK[:, None]
    return terms.abs().sum(-1).amax(-1), upper_N


def _by_cells(
    d_NK: Tensor, u_NK: Tensor, v_NK: Tensor, c_NK: Tensor, fixed_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return signs that come near the best in each cell, and the bound over all."""
    free_NK = fixed_NK == 0
    weight_NK = torch.where(free_NK, v_NK, 0.0)
    total_N1 = weight_NK.sum(-1, keepdim=True)
    pinned_N1 = (v_NK * fixed_NK).sum(-1, keepdim=True)
    edges_E = torch.linspace(-1, 1, CELLS + 1, dtype=torch.float64, device=d_NK.device)
    m_NE = pinned_N1 + total_N1 * edges_E
    ends_NEK = c_NK[:, None] - u_NK[:, None] * m_NE[..., None]
    plus, minus = ((ends_NEK + s * d_NK[:, None]).abs() for s in (1, -1))
    plus_NCK, minus_NCK = (torch.maximum(x[:, :-1], x[:, 1:]) for x in (plus, minus))
    plus_NCK = torch.where(fixed_NK[:, None] < 0, minus_NCK, plus_NCK)
    minus_NCK = torch.where(fixed_NK[:, None] > 0, plus_NCK, minus_NCK)
    gain_NCK = plus_NCK - minus_NCK
    taken_NC = (
        (total_N1 * (edges_E + 1) / 2)[:, :-1],
        (total_N1 * (edges_E + 1) / 2)[:, 1:],
    )
    value_NC, chosen_NCK = _knapsack(gain_NCK, weight_NK, *taken_NC)
    signs = torch.where(free_NK[:, None], 2.0 * chosen_NCK - 1, fixed_NK[:, None])
    return signs, (minus_NCK.sum(-1) + value_NC).amax(-1)


def _knapsack(
    gain_NCK: Tensor, weight_NK: Tensor, least_NC: Tensor, most_NC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the best fractional gain with total weight in [least, most], and a choice.

    By gain per weight, best first: free gains are taken, then positive ones up to
    ``most``, then the least bad up to ``least``. The value is concave in the weight.
    """
    weight_NCK = weight_NK[:, None].expand_as(gain_NCK)
    rate_NCK = torch.where(
        weight_NCK > 0, gain_NCK / weight_NCK, gain_NCK.sign() * torch.inf
    )
    rate_NCK = torch.where(gain_NCK == 0, 0.0, rate_NCK)
    order = rate_NCK.argsort(-1, descending=True)
    rate, weight, gain = (x.gather(-1, order) for x in (rate_NCK, weight_NCK, gain_NCK))
    ends = weight.cumsum(-1)
    best = (weight * (gain > 0)).sum(-1)
    target_NC1 = torch.minimum(torch.maximum(best, least_NC), most_NC).unsqueeze(-1)
    share = ((target_NC1 - (ends - weight)) / weight).clamp(0, 1)
    share = torch.where(weight > 0, share, (gain > 0).double())
    value = (share * gain).sum(-1)
    chosen = torch.zeros_like(gain_NCK).scatter(-1, order, (share > 0.5).double())
    return value, chosen
