"""Bounds on the curvature of an attention layer that are never below the truth.

Axes, in this file:  H head · L, Q token · K key · D model width · E key width ·
F value width · A channel of some factor.

For ℓ(y) with gradient g and ‖∇²ℓ‖ ≤ B at the output, H = Jᵀ(∇²ℓ)J + ∇²⟨g, y⟩. Each
block of the second is Σ_i l_i ⊗ M_i ⊗ r_i over queries, M_i a small matrix, and

    ‖Σ_i l_i ⊗ M_i ⊗ r_i‖ ≤ ‖Σ_i ‖M_i‖ l_il_iᵀ‖^½ · ‖Σ_i ‖M_i‖ r_ir_iᵀ‖^½

(Cauchy–Schwarz, weight ‖M_i‖ on each query). The norm of a matrix of blocks is at most
that of the matrix of their norms; heads meet only in the first term.

How scores move with W_K has several bounds (``key_factors``). Plain keys:
dt_ij = s·q_iᵀ dW_Kᵀ x_j, the factor x_j at every query's own q_i. Rotation couples
them, dt_ij = s·⟨x_j ⊗ R_jᵀq_i, dW_K⟩: either all of it is the factor and no more is
left to a query; or the keys move freely, the factor e_j at every q_i, times
‖Σ_j ‖R_j‖² x_jx_jᵀ‖^½, by which W_K moves all keys at most (‖X‖, if R_j keep lengths).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.theory.lipschitz.forward import Mask
from equipoise.theory.lipschitz.heads import Heads, Rotary
from equipoise_lab.theory.curvature.attention import plain_attention
from equipoise_lab.theory.curvature.attention_blocks import Queries, queries_of


class KeyFactor(NamedTuple):
    """Σ_j b_ij f_ij (dt_ij/s), for any f: ‖M_i‖ with this factor, times ‖left_i‖."""

    factor_QKA: Tensor
    """About its mean under a_i."""
    left_QE: Tensor


def key_factors(queries: Queries) -> list[KeyFactor]:
    """Return every way; a bound may take the least."""
    q_QE, rotary = queries.at.q_HQE[0], queries.at.heads.rotary
    if rotary is None:
        return [KeyFactor(queries.about(queries.x_KD), q_QE)]
    turns_KEE = _rotations(rotary, queries)
    sizes_K1 = torch.linalg.matrix_norm(turns_KEE, ord=2)[:, None]
    most = torch.linalg.matrix_norm(sizes_K1 * queries.x_KD, ord=2)
    free_QKK = queries.about(torch.eye(len(queries.x_KD)).to(q_QE))
    return [
        KeyFactor(_whole(queries), torch.ones_like(q_QE[:, :1])),
        KeyFactor(most * free_QKK, q_QE),
    ]


def _whole(queries: Queries) -> Tensor:
    """Return factors with the inner products of x_j ⊗ R_jᵀq_i about their mean."""
    u_QKE = queries.at.pulled_keys()[0]
    gram_QKK = (u_QKE @ u_QKE.mT) * (queries.x_KD @ queries.x_KD.mT)
    eye_KK = torch.eye(gram_QKK.shape[-1]).to(gram_QKK)
    about_QKK = eye_KK - queries.a_QK[:, None]
    values_QA, vectors_QKA = torch.linalg.eigh(about_QKK @ gram_QKK @ about_QKK.mT)
    factor_QKA: Tensor = vectors_QKA * values_QA.clamp_min(0).sqrt()[:, None]
    return factor_QKA


def _rotations(rotary: Rotary, queries: Queries) -> Tensor:
    """Return R_j of every key."""
    eye_EE = torch.eye(queries.at.k_HKE.shape[-1]).to(queries.x_KD)
    return rotary.rotate(eye_EE[:, None], queries.at.at_K).permute(1, 2, 0)


def crossed_norm(queries: Queries) -> Tensor:
    """Return ‖Σ_ij p_ij x_ix_jᵀ ⊗ R_iᵀR_j‖: scores are linear in q and in k."""
    rotary, x_KD, p_QK = queries.at.heads.rotary, queries.x_KD, queries.p_QK
    norm = torch.linalg.matrix_norm
    if rotary is None:
        plain: Tensor = norm(queries.x_QD.mT @ p_QK @ x_KD, ord=2)
        return plain
    turns_KEE = _rotations(rotary, queries)
    found = []
    for channels in _rotation_pairs(rotary, turns_KEE.shape[-1]):
        turn_KEE = turns_KEE[:, channels][..., channels]
        moved_EKX = torch.einsum("KEA,KD->EKDA", turn_KEE, x_KD).flatten(2)
        asked_EQX = moved_EKX[:, queries.at.at_Q]
        found.append(norm((asked_EQX.mT @ p_QK @ moved_EKX).sum(0), ord=2))
    return torch.stack(found).max()


def _rotation_pairs(rotary: Rotary, width: int) -> list[list[int]]:
    """Return the channels in groups that a rotation does not mix."""
    turned = rotary.cos_LR.shape[-1]
    half = turned // 2
    if rotary.interleaved:
        pairs = [[2 * r, 2 * r + 1] for r in range(half)]
    else:
        pairs = [[r, r + half] for r in range(half)]
    return pairs + ([[turned]] if turned < width else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBound:
    """‖H‖ ≤ value, over (W_Q, W_K, W_V) of all heads."""

    value: float
    functional: float
    """Of ∇²⟨g, y⟩ alone."""
    outer: float
    """Of Jᵀ(∇²ℓ)J alone."""


def attention_curvature_bound(
    heads: Heads,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    *,
    loss_curvature: float = 0.0,
    mask: Mask | None = None,
) -> AttentionBound:
    """Return a bound from the moments of each query, at the cost of a forward pass.

    Args:
        heads: The layer; heads that share keys count once each.
        x_LD, g_LD: What it reads, and the gradient of the loss at what it returns.
        loss_curvature: ‖∇²ℓ‖ at the output: 2/entries for a mean of squares.
        mask: As for ``attend``.
    """
    if not all_finite(x_LD, g_LD, *heads.weights):
        return AttentionBound(value=math.nan, functional=math.nan, outer=math.nan)
    norms = attention_norms(heads, x_LD, g_LD, mask=mask)
    j_N = norms.jacobian(torch.eye(x_LD.shape[1]).expand(len(x_LD), -1, -1))
    outer_NN = loss_curvature * torch.outer(j_N, j_N)
    return AttentionBound(
        value=top(norms.functional_NN + outer_NN),
        functional=top(norms.functional_NN),
        outer=top(outer_NN),
    )


class AttentionNorms:
    """Norms by weight, in the order Q, K, V of each head (N = 3·heads)."""

    def __init__(self, each: list[Queries], *, copies: int) -> None:
        self.each = [_Head(queries) for queries in each]
        # A weight shared by n heads is n copies tied together: √n on each of them.
        tied = math.sqrt(copies)
        self.tied_N = torch.tensor([1.0, tied, tied]).repeat(len(each))
        self.tied_N = self.tied_N.to(each[0].x_QD)

    @property
    def functional_NN(self) -> Tensor:
        """Return the norms of the blocks of ∇²⟨g, y⟩."""
        bent_NN = torch.block_diag(*(head.functional() for head in self.each))
        tied_NN: Tensor = self.tied_N[:, None] * bent_NN * self.tied_N
        return tied_NN

    def jacobian(self, gram_LDD: Tensor) -> Tensor:
        """Return the norms of Σ C_i·∂y_i/∂W, CᵀC given for every row of y."""
        gram_LDD = gram_LDD.to(self.tied_N)
        return self.tied_N * torch.cat([h.jacobian(gram_LDD) for h in self.each])

    def crossed(self, gram_LDD: Tensor, right_LM: Tensor) -> Tensor:
        """Return bounds on Σ_i (C_i·∂y_i/∂W)ᵀ ⊗ r_i, CᵀC given for every row."""
        gram_LDD = gram_LDD.to(self.tied_N)
        each = [head.crossed(gram_LDD, right_LM) for head in self.each]
        return self.tied_N * torch.cat(each)


def attention_norms(
    heads: Heads, x_LD: Tensor, g_LD: Tensor, *, mask: Mask | None = None
) -> AttentionNorms:
    """Return what a bound on a layer, or on a block around it, is made of."""
    at = plain_attention(heads, x_LD, mask=mask)
    x_LD = x_LD.to(at.p_HQK.dtype)
    each = [
        queries_of(at.some(heads=slice(h, h + 1)), x_LD, g_LD.to(x_LD))
        for h in range(len(at.p_HQK))
    ]
    return AttentionNorms(each, copies=len(each) // len(heads.w_k_GDE))


class _Head:
    """One head: ‖M_i‖ of every query and block, then sums over queries."""

    def __init__(self, queries: Queries) -> None:
        self.queries, self.scale = queries, queries.scale
        self.k_QKE = _pulled(queries, queries.about(queries.at.k_HKE[0]))
        self.x_QKD = queries.about(queries.x_KD)
        self.keys = key_factors(queries)
        left_QFK = (queries.a_QK[..., None] * queries.about(queries.at.v_HKF[0])).mT
        # Norms of products see only R of Mᵀ = QR.
        self.moved = [
            torch.linalg.qr((left_QFK @ right).mT, mode="r").R
            for right in (self.k_QKE, *(key.factor_QKA for key in self.keys))
        ]

    def functional(self) -> Tensor:
        """Return the norms of the blocks of ∇²⟨g, y⟩, ordered Q, K, V."""
        s, x, c = self.scale, self.queries.x_QD, self.queries.c_QF
        p, a = self.queries.p_QK, self.queries.a_QK
        qq = s**2 * summed(_norm(p, self.k_QKE, self.k_QKE), x, x)
        kk = s**2 * _least(summed(_norm(p, f, f), q, q) for f, q in self.keys)
        qk = s**2 * _least(summed(_norm(p, self.k_QKE, f), x, q) for f, q in self.keys)
        qk = qk + s * crossed_norm(self.queries)
        vq = s * summed(_norm(a, self.x_QKD, self.k_QKE), c, x)
        vk = s * _least(summed(_norm(a, self.x_QKD, f), c, q) for f, q in self.keys)
        zero = torch.zeros_like(vk)
        rows = [[qq, qk, vq], [qk, kk, vk], [vq, vk, zero]]
        return torch.stack([torch.stack(row) for row in rows])

    def jacobian(self, gram_QDD: Tensor) -> Tensor:
        """Return ‖Σ C_i·∂y_i/∂W‖ for Q, K, V."""
        return torch.stack(
            [
                _least(summed(size, left, left).sqrt() for size, left in ways)
                for ways in self._ways(gram_QDD)
            ]
        )

    def crossed(self, gram_QDD: Tensor, right_QM: Tensor) -> Tensor:
        """Return bounds on Σ_i (C_i·∂y_i/∂W)ᵀ ⊗ r_i for Q, K, V."""
        return torch.stack(
            [
                _least(summed(size.sqrt(), left, right_QM) for size, left in ways)
                for ways in self._ways(gram_QDD)
            ]
        )

    def _ways(self, gram_QDD: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """Return for Q, K, V every way to see ∂y_i/∂W as l_i ⊗ M_i: ‖C_i M_i‖², l_i."""
        w_o_FD = self.queries.at.heads.w_o_HFD[0]
        gram_QFF = w_o_FD @ gram_QDD @ w_o_FD.mT
        for_q, *for_k = (
            self.scale**2 * _largest(m @ gram_QFF @ m.mT) for m in self.moved
        )
        mixed_QD = self.queries.a_QK @ self.queries.x_KD
        return [
            [(for_q, self.queries.x_QD)],
            [(m_Q, key.left_QE) for m_Q, key in zip(for_k, self.keys, strict=True)],
            [(_largest(gram_QFF), mixed_QD)],
        ]


def _pulled(queries: Queries, k_QKE: Tensor) -> Tensor:
    """Return R_iᵀk_ij: what a key means to x_i W_Q."""
    return queries.at.pulled_queries(k_QKE.mT[None])[0].mT


def _norm(b_QK: Tensor, f_QKD: Tensor, h_QKE: Tensor) -> Tensor:
    """Return ‖Σ_j b_ij f_ij h_ijᵀ‖₂ of every query."""
    left_QAK = b_QK[:, None] * _triangle(f_QKD)
    norm_Q: Tensor = torch.linalg.matrix_norm(left_QAK @ _triangle(h_QKE).mT, ord=2)
    return norm_Q


def _least(bounds: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(bounds)).min(0).values


def _triangle(f_QKD: Tensor) -> Tensor:
    """Return R of fᵀ = QR if that is smaller: norms of products do not see Q."""
    K, D = f_QKD.shape[-2:]
    return f_QKD.mT if K >= D else torch.linalg.qr(f_QKD.mT, mode="r").R


def summed(weight_Q: Tensor, left_QD: Tensor, right_QE: Tensor) -> Tensor:
    """Return ‖Σ wᵢ lᵢlᵢᵀ‖^½·‖Σ wᵢ rᵢrᵢᵀ‖^½."""
    root_Q1 = weight_Q.sqrt()[:, None]
    norm = torch.linalg.matrix_norm
    both: Tensor = norm(root_Q1 * left_QD, ord=2) * norm(root_Q1 * right_QE, ord=2)
    return both


def _largest(gram_QFF: Tensor) -> Tensor:
    """Return the largest eigenvalue of each matrix, none being negative."""
    found_Q: Tensor = torch.linalg.eigvalsh(gram_QFF)[..., -1].clamp_min(0)
    return found_Q


def all_finite(*tensors: Tensor) -> bool:
    """Say whether a decomposition may be asked for: with NaN it would raise."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def top(matrix: Tensor) -> float:
    """Return ‖·‖₂ from the smaller Gram matrix: squaring keeps the largest value."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    return float(torch.linalg.eigvalsh(wide @ wide.mT)[-1].clamp_min(0).sqrt())


def attention_norm_bound(
    heads: Heads,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    *,
    loss_curvature: float = 0.0,
) -> float:
    """Return a bound from norms of weights, tokens and gradient alone (one head).

    It holds for every mask and needs no forward pass; loose by orders of magnitude.
    """
    if len(heads.w_q_HDE) != 1 or heads.rotary is not None:
        raise InputError("the bound from norms is for one head without rotation")
    s, big = heads.slope, loss_curvature
    two = [top(w[0]) for w in heads.weights]
    (q, k), v = two[:2], top(heads.w_v_GDF[0] @ heads.w_o_HFD[0])
    x, g = top(x_LD), top(g_LD)
    c_LD = x_LD @ heads.w_v_GDF[0] @ heads.w_o_HFD[0]
    rho = 2 * float(g_LD.norm(dim=-1).max() * c_LD.norm(dim=-1).max())
    length = math.sqrt(len(x_LD))
    bent, cross = s**2 * rho * x**4 / 2, s * x**3 / 2
    outer = big * s**2 * v**2 * x**6 / 4
    mixed = big * s * length * v * x**4 / 2
    qk = (outer + bent) * k * q + float(g_LD.norm()) * v * cross
    w_o = two[3]
    vq, vk = (
        mixed * k * w_o + g * w_o * k * cross,
        mixed * q * w_o + g * w_o * q * cross,
    )
    rows = [
        [(outer + bent) * k**2, qk, vq],
        [qk, (outer + bent) * q**2, vk],
        [vq, vk, big * len(x_LD) * x**2 * w_o**2],
    ]
    return top(torch.tensor(rows, dtype=torch.float64))
