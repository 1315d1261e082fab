"""Rows of logits: what their range allows, and how weights react to them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from equipoise.numerics.normalisers import NORMALISERS, rows
from equipoise.numerics.selection import (
    entropy_floor,
    logit_range,
    range_needed,
    step_bound,
    weight_interval,
)
from tests.numerics.selection.specimens import normal
from tests.numerics.selection.trials.inequality import D, Inequality, K, Rng, Sides

FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp(l/0.1)": lambda z: torch.exp(z / 0.1),
    "softplus": torch.nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "quadratic": lambda z: 1 + z.square(),
    "elu + 1": lambda z: torch.nn.functional.elu(z) + 1,
}
"""Positive maps of logits whose normalised values are weights."""


def logit_rows(count: int, rng: Rng) -> Tensor:
    """Normal logits of every scale from 0.001 to 30, a sixth of them with ties."""
    scale = 10 ** (4.5 * torch.rand(count, 1, generator=rng, dtype=torch.float64) - 3)
    z = scale * normal(count, K, rng=rng)
    z[::6, 1] = z[::6, 0]
    return z


def _lemma_1(F: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Sides]:
    def sides(z_NK: Tensor) -> Sides:
        f_NK = F(z_NK.clamp(-30, 30)).clamp_min(1e-300)
        alpha_NK = f_NK / f_NK.sum(-1, keepdim=True)
        rho_N = (f_NK.amax(-1) / f_NK.amin(-1)).log()
        ends = weight_interval(rho_N, torch.tensor(float(K)))
        small = torch.cat([ends.lower, alpha_NK.amax(-1)])
        return small, torch.cat([alpha_NK.amin(-1), ends.upper])

    return sides


def _corollary_1(params_NP: Tensor) -> Sides:
    """Softmax of q·k/T: ρ ≤ 2‖q‖max‖k‖/T, and both ends of the interval."""
    q_ND, k_NKD = params_NP[:, :D], params_NP[:, D:].reshape(-1, K, D)
    z_NK = torch.einsum("nd,nkd->nk", q_ND, k_NKD) / 0.7
    delta_N = q_ND.norm(dim=-1) * k_NKD.norm(dim=-1).amax(-1)
    rho_N, p_NK = logit_range(z_NK), z_NK.softmax(-1)
    ends = weight_interval(rho_N, torch.tensor(float(K)))
    small = torch.cat([rho_N, ends.lower, p_NK.amax(-1)])
    return small, torch.cat([2 * delta_N / 0.7, p_NK.amin(-1), ends.upper])


def _entropy(z_NK: Tensor) -> Sides:
    p_NK = z_NK.softmax(-1)
    truth = torch.special.entr(p_NK).sum(-1)
    return entropy_floor(logit_range(z_NK), torch.tensor(float(K))), truth


def _range_needed(z_NK: Tensor) -> Sides:
    share = z_NK.softmax(-1).amax(-1).clamp(max=1 - 1e-12)
    needed = torch.tensor([range_needed(K, c) for c in share.tolist()]).double()
    return needed, z_NK.amax(-1) - z_NK.amin(-1)


def _lemma_2(F: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Sides]:
    """‖J‖₂ ≤ ½max|h|, |J_ij| ≤ ¼max|h|, ‖J‖₂ ≤ √L‖α‖₂max|F'|/ΣF, by autograd."""

    def sides(z_NK: Tensor) -> Sides:
        z_NK = z_NK.clamp(-20, 20)
        J = vmap(jacrev(lambda z: F(z) / F(z).sum()))(z_NK)
        slope = vmap(vmap(jacrev(F)))(z_NK).abs()
        f = F(z_NK)
        h = (slope / f).amax(-1)
        norm = torch.linalg.matrix_norm(J, ord=2)
        total = f.sum(-1)
        third = K**0.5 * (f / total[:, None]).norm(dim=-1) * slope.amax(-1) / total
        small = torch.cat([norm, J.abs().amax((-1, -2)), norm])
        return small, torch.cat([h / 2, h / 4, third])

    return sides


def _bracket(z_NK: Tensor) -> Sides:
    """p₍₂₎ ≤ ‖J‖₂ ≤ min{p₍₁₎, 2max p(1−p), ½}, and ‖J‖_F ≤ ½."""
    p = z_NK.softmax(-1)
    J = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    norm = torch.linalg.matrix_norm(J, ord=2)
    ends = p.sort(-1, descending=True).values
    top = torch.minimum(ends[:, 0], 2 * (p * (1 - p)).amax(-1)).clamp(max=0.5)
    frobenius = torch.linalg.matrix_norm(J)
    half = torch.full_like(norm, 0.5)
    return torch.cat([ends[:, 1], norm, frobenius]), torch.cat([norm, top, half])


def _finite_step(params_NP: Tensor) -> Sides:
    """‖softmax((l+εv)/T) − softmax(l/T)‖/ε ≤ min{1/(2T), √2/ε}."""
    z, v = params_NP[:, :K], params_NP[:, K : 2 * K]
    v = torch.nn.functional.normalize(v, dim=-1)
    small, large = [], []
    for T in (0.01, 0.1, 1.0):
        for step in (1e-3, 0.1, 10.0):
            moved = ((z + step * v) / T).softmax(-1) - (z / T).softmax(-1)
            small.append(moved.norm(dim=-1) / step)
            large.append(torch.full_like(small[-1], step_bound(T, step)))
    return torch.cat(small), torch.cat(large)


def _constants(name: str) -> Callable[[Tensor], Sides]:
    """‖J‖₂ and ‖J‖_{∞→1} of a rival stay below its constants."""

    def sides(z_NK: Tensor) -> Sides:
        rule, given = NORMALISERS[name](), rows(z_NK)
        constants = rule.lipschitz(K)
        norm = torch.linalg.matrix_norm(rule.jacobian(given).dense(), ord=2)
        theta = rule.theta(given).lower
        caps = (constants.two, constants.infinity_to_one)
        return torch.cat([norm, theta]), torch.cat(
            [
                torch.full_like(n, cap)
                for n, cap in zip((norm, theta), caps, strict=True)
            ]
        )

    return sides


def _exact_zeros(z_NK: Tensor) -> Sides:
    """Entmax gives 0 to a key 1/(α−1) below the largest: gap·weight is 0 there."""
    small = []
    for name, gap in (("sparsemax", 1.0), ("entmax15", 2.0)):
        w = NORMALISERS[name]().weights(rows(z_NK))
        far = z_NK <= z_NK.amax(-1, keepdim=True) - gap
        small.append((w * far).amax(-1))
    found = torch.cat(small)
    return found, torch.zeros_like(found)


def _wide(width: int) -> Callable[[int, Rng], Tensor]:
    return lambda count, rng: logit_rows(count * width, rng).reshape(count, -1)


def _keys(count: int, rng: Rng) -> Tensor:
    scale = 10 ** (2 * torch.rand(count, 1, generator=rng, dtype=torch.float64) - 1.5)
    return scale * normal(count, D + K * D, rng=rng)


_BOUNDED = sorted(set(NORMALISERS) - {"self-adjusted", "softpick"})

LOGITS: dict[str, Inequality] = {
    **{
        f"Lemma 1, tight, F = {name}": Inequality(logit_rows, _lemma_1(F))
        for name, F in FAMILIES.items()
    },
    "Corollary 1, tight": Inequality(_keys, _corollary_1),
    "entropy ≥ ln n − ρ": Inequality(logit_rows, _entropy),
    "ρ needed for a share": Inequality(logit_rows, _range_needed),
    **{
        f"Lemma 2', F = {name}": Inequality(logit_rows, _lemma_2(F))
        for name, F in FAMILIES.items()
    },
    "‖J‖₂ between p₍₂₎ and p₍₁₎": Inequality(logit_rows, _bracket),
    "g ≤ min{1/(2T), √2/ε}": Inequality(_wide(2), _finite_step),
    **{
        f"constants of {name}": Inequality(logit_rows, _constants(name))
        for name in _BOUNDED
    },
    "exact zeros of entmax": Inequality(logit_rows, _exact_zeros),
}
