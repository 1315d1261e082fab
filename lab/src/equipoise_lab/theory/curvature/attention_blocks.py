"""Every block of the second derivative of attention in its weights W_Q, W_K, W_V, W_O.

Axes, in this file:  H query head · G key/value head · Q query · K key · L token ·
D, C model width · E, A width of queries and keys · F width of values · X = D·E flat.

For a query i, a_i are its weights, c_i the cotangent of its output, p_i that of its
scores, κ_ij the key as W_Q sees it and w_ij = x_j ⊗ u_ij, u_ij the query as W_K sees it
(with rotation both depend on the pair, without it on one token). With s the scale and
central moments M_b(f, h) = Σ_j b_ij (f_j − f̄)(h_j − h̄)ᵀ, f̄ = Σ_j a_ij f_j:

    QQ = s² Σ_i x_ix_iᵀ ⊗ M_p(κ, κ)          KK = s² Σ_i M_p(w, w)
    QK = s² Σ_i x_i ⊗ M_p(κ, w) + s Σ_ij p_ij x_ix_jᵀ ⊗ ∂²(q_i·k_j)
    VQ = s Σ_i c_i x_i ⊗ M_a(x, κ)           VK = s Σ_i c_i ⊗ M_a(x, w)
    OQ = s Σ_i g_i x_i ⊗ M_a(v, κ)           OK = s Σ_i g_i ⊗ M_a(v, w)
    OV = Σ_i g_i m_i ⊗ I, m_i = Σ_j a_ij x_j    VV = OO = 0

Heads do not mix; those that share keys and values add. Cost O(L·D²E²) per head. Without
rotation u_ij = q_i whatever the key, so M(w, ·) = M(x, ·) ⊗ q_i and every block is a
sum over queries of two matrices (``plain_blocks``): it is read with its axes permuted,
and never copied. With rotation no two pairs (i, j) are alike (``rotated_blocks``).
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.theory.curvature.softmax import softmax_gradient
from equipoise.theory.lipschitz.forward import AttentionForward, Mask
from equipoise.theory.lipschitz.heads import Heads, Rotary
from equipoise_lab.theory.curvature.attention import plain_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """One head at its point, as seen by some of its queries."""

    at: AttentionForward
    """Of one head."""
    x_QD: Tensor
    x_KD: Tensor
    g_QC: Tensor
    """Cotangent of the layer's output."""
    c_QF: Tensor
    """Of this head's output."""
    p_QK: Tensor
    """Of its scores."""

    @property
    def a_QK(self) -> Tensor:
        return self.at.p_HQK[0]

    @property
    def scale(self) -> float:
        return self.at.heads.slope

    def about(self, f_KD: Tensor) -> Tensor:
        """Return f_j − Σ_j a_ij f_j for every query."""
        return f_KD - (self.a_QK @ f_KD)[:, None]

    def ov(self) -> Tensor:
        """Return δ_ff' Σ_i g_ic m_id, the block of W_O with W_V."""
        m_CD = self.g_QC.mT @ (self.a_QK @ self.x_KD)
        eye_FF = torch.eye(self.c_QF.shape[1]).to(m_CD)
        return eye_FF[:, None, None, :] * m_CD[None, :, :, None]


def queries_of(at: AttentionForward, x_LD: Tensor, g_LD: Tensor) -> Queries:
    """Return what a block needs of one head; ``at`` may hold a part of its queries."""
    g_QC = g_LD[at.at_Q]
    c_QF = g_QC @ at.heads.w_o_HFD[0].mT
    p_QK = softmax_gradient(at.p_HQK[0], c_QF @ at.v_HKF[0].mT)
    return Queries(
        at=at, x_QD=x_LD[at.at_Q], x_KD=x_LD, g_QC=g_QC, c_QF=c_QF, p_QK=p_QK
    )


def moment(b_QK: Tensor, f_QKD: Tensor, h_QKE: Tensor) -> Tensor:
    """Return Σ_j b_ij f_ij h_ijᵀ, one matrix per query."""
    return (b_QK[..., None] * f_QKD).mT @ h_QKE


def pairs(f_QD: Tensor, h_QE: Tensor) -> Tensor:
    """Return f_i h_iᵀ, one matrix per query."""
    return f_QD[:, :, None] * h_QE[:, None, :]


def summed(f_QDE: Tensor, h_QCA: Tensor) -> Tensor:
    """Return Σ_i f_i ⊗ h_i with four axes, by one product of matrices."""
    flat = f_QDE.flatten(1).mT @ h_QCA.flatten(1)
    return flat.reshape(*f_QDE.shape[1:], *h_QCA.shape[1:])


def plain_blocks(queries: Queries, *, output: bool) -> list[Tensor]:
    """Return qq, qk, kk, vq, vk and, with W_O, oq, ok, ov."""
    found = [_plain_qq(queries), _plain_qk(queries), _plain_kk(queries)]
    found += _plain_linear_in(queries, queries.x_KD, queries.c_QF)
    if output:
        found += _plain_linear_in(queries, queries.at.v_HKF[0], queries.g_QC)
        found += [queries.ov()]
    return found


def _plain_qq(queries: Queries) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QEA = queries.scale**2 * moment(queries.p_QK, k_QKE, k_QKE)
    h_DCEA = summed(pairs(queries.x_QD, queries.x_QD), m_QEA)
    return h_DCEA.permute(0, 2, 1, 3)


def _plain_kk(queries: Queries) -> Tensor:
    x_QKD, q_QE = queries.about(queries.x_KD), queries.at.q_HQE[0]
    m_QDC = queries.scale**2 * moment(queries.p_QK, x_QKD, x_QKD)
    h_DCEA = summed(m_QDC, pairs(q_QE, q_QE))
    return h_DCEA.permute(0, 2, 1, 3)


def _plain_qk(queries: Queries) -> Tensor:
    k_QKE, x_QKD = queries.about(queries.at.k_HKE[0]), queries.about(queries.x_KD)
    m_QEC = queries.scale**2 * moment(queries.p_QK, k_QKE, x_QKD)
    h_DAEC = summed(pairs(queries.x_QD, queries.at.q_HQE[0]), m_QEC)
    h_DECA = h_DAEC.permute(0, 2, 3, 1)
    # Scores are linear in q and in k: s Σ_ij p_ij x_ix_jᵀ where their channels meet.
    crossed_DC = queries.x_QD.mT @ queries.p_QK @ queries.x_KD
    h_DECA.diagonal(dim1=1, dim2=3).add_(queries.scale * crossed_DC[..., None])
    return h_DECA


def _plain_linear_in(queries: Queries, v_KF: Tensor, c_QC: Tensor) -> list[Tensor]:
    """Return the blocks with Q and with K of a weight the output is linear in.

    v_j is what that weight multiplies and c_i the cotangent of the product: (x, c) for
    W_V and (v, g) for W_O.
    """
    a_QK, v_QKF = queries.a_QK, queries.about(v_KF)
    k_QKE, x_QKD = queries.about(queries.at.k_HKE[0]), queries.about(queries.x_KD)
    m_QFE = queries.scale * moment(a_QK, v_QKF, k_QKE)
    m_QFD = queries.scale * moment(a_QK, v_QKF, x_QKD)
    h_CDFE = summed(pairs(c_QC, queries.x_QD), m_QFE)
    h_CEFD = summed(pairs(c_QC, queries.at.q_HQE[0]), m_QFD)
    return [h_CDFE.permute(2, 0, 1, 3), h_CEFD.permute(2, 0, 3, 1)]


def rotated_blocks(queries: Queries, rotary: Rotary, *, output: bool) -> list[Tensor]:
    """Return qq, qk, kk, vq, vk and, with W_O, oq, ok, ov."""
    u_QKE = queries.at.pulled_keys()[0]
    w_QKX = (queries.x_KD[:, :, None] * u_QKE[:, :, None, :]).flatten(2)
    found = [
        _rotated_qq(queries),
        _rotated_qk(queries, rotary, w_QKX),
        _rotated_kk(queries, u_QKE, w_QKX),
    ]
    found += _rotated_linear_in(queries, queries.x_KD, queries.c_QF, w_QKX)
    if output:
        found += _rotated_linear_in(queries, queries.at.v_HKF[0], queries.g_QC, w_QKX)
        found += [queries.ov()]
    return found


def _rotated_qq(queries: Queries) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QEA = queries.scale**2 * moment(queries.p_QK, k_QKE, k_QKE)
    m_QEA = _pulled(queries, _pulled(queries, m_QEA).mT)
    return summed(pairs(queries.x_QD, queries.x_QD), m_QEA).permute(0, 2, 1, 3)


def _rotated_qk(queries: Queries, rotary: Rotary, w_QKX: Tensor) -> Tensor:
    k_QKE = queries.about(queries.at.k_HKE[0])
    pk_QKE = queries.p_QK[..., None] * k_QKE
    mean_QX = _mean(queries.a_QK, w_QKX)
    bent_QEX = pk_QKE.mT @ w_QKX - pairs(pk_QKE.sum(1), mean_QX)
    t_QEX = queries.scale**2 * bent_QEX + queries.scale * _crossed(queries, rotary)
    h_DX = queries.x_QD.mT @ _pulled(queries, t_QEX).flatten(1)
    return _four(h_DX, queries, queries.x_QD.shape[1])


def _crossed(queries: Queries, rotary: Rotary) -> Tensor:
    """Return Σ_j p_ij R_j ⊗ x_j: the scores are linear in q and in k."""
    E = queries.at.k_HKE.shape[-1]
    eye_EE = torch.eye(E).to(queries.x_KD)
    # Row l of the turned identity is R_j e_l; R_j has it as a column.
    turn_KEA = rotary.rotate(eye_EE[:, None], queries.at.at_K).permute(1, 2, 0)
    z_KEDA = queries.x_KD[:, None, :, None] * turn_KEA[:, :, None, :]
    z_QX = queries.p_QK @ z_KEDA.flatten(1)
    return z_QX.reshape(len(z_QX), E, -1)


def _rotated_kk(queries: Queries, u_QKE: Tensor, w_QKX: Tensor) -> Tensor:
    u_KQE, p_KQ = u_QKE.transpose(0, 1), queries.p_QK.mT
    own_DCEA = summed(pairs(queries.x_KD, queries.x_KD), moment(p_KQ, u_KQE, u_KQE))
    mean_QX, slope_QX = _mean(queries.a_QK, w_QKX), _mean(queries.p_QK, w_QKX)
    off_XX = slope_QX.mT @ mean_QX
    off_DECA = _four(off_XX + off_XX.mT, queries, queries.x_KD.shape[1])
    return queries.scale**2 * (own_DCEA.permute(0, 2, 1, 3) - off_DECA)


def _rotated_linear_in(
    queries: Queries, v_KF: Tensor, c_QC: Tensor, w_QKX: Tensor
) -> list[Tensor]:
    """Return the blocks with Q and with K of a weight the output is linear in."""
    av_QKF = queries.a_QK[..., None] * queries.about(v_KF)
    k_QKE = queries.about(queries.at.k_HKE[0])
    m_QFE = queries.scale * _pulled(queries, k_QKE.mT @ av_QKF).mT
    with_q = summed(pairs(c_QC, queries.x_QD), m_QFE).permute(2, 0, 1, 3)
    m_QFX = queries.scale * (av_QKF.mT @ w_QKX)
    with_k = torch.einsum("QC,QFX->FCX", c_QC, m_QFX)
    return [with_q, with_k.unflatten(2, (queries.x_KD.shape[1], -1))]


def _mean(b_QK: Tensor, w_QKX: Tensor) -> Tensor:
    return (b_QK[:, None] @ w_QKX)[:, 0]


def _four(h: Tensor, queries: Queries, width: int) -> Tensor:
    return h.reshape(width, queries.at.k_HKE.shape[-1], queries.x_KD.shape[1], -1)


def _pulled(queries: Queries, t_QEX: Tensor) -> Tensor:
    """Return R_iᵀ applied to each column: a direction of q_i as one of x_i W_Q."""
    return queries.at.pulled_queries(t_QEX[None])[0]


# Numbers in one tensor over the queries of a chunk: 128 MiB in fp64.
_BUDGET = 2**24
Blocks = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHessian:
    """The blocks of ∇²⟨g, y⟩ that are not zero, four axes each: two of each weight.

    One block per query head, or per key/value head for kk and vk. Axes may be strided:
    nothing is copied to make rows of them.
    """

    qq_DEDE: Blocks
    qk_DEDE: Blocks
    kk_DEDE: Blocks
    vq_DFDE: Blocks
    vk_DFDE: Blocks
    oq_FDDE: Blocks = ()
    ok_FDDE: Blocks = ()
    ov_FDDF: Blocks = ()

    def dense(self) -> Float[Tensor, "N N"]:
        """Return the whole matrix over (W_Q, W_K, W_V and, if asked for, W_O)."""
        H, G = len(self.qq_DEDE), len(self.kk_DEDE)
        D, F, _, E = self.vq_DFDE[0].shape
        k0, v0, o0 = H * D * E, (H + G) * D * E, (H + G) * D * E + G * D * F
        whole = self.qq_DEDE[0].new_zeros(2 * [o0 + len(self.ov_FDDF) * D * F])

        def put(block: Tensor, row: int, column: int) -> None:
            flat = block.flatten(2).flatten(0, 1)
            rows, columns = flat.shape
            whole[row : row + rows, column : column + columns] = flat
            whole[column : column + columns, row : row + rows] = flat.mT

        for h in range(H):
            g, q = h * G // H, h * D * E
            k, v, o = k0 + g * D * E, v0 + g * D * F, o0 + h * D * F
            put(self.qq_DEDE[h], q, q)
            put(self.qk_DEDE[h], q, k)
            put(self.kk_DEDE[g], k, k)
            put(self.vq_DFDE[h], v, q)
            put(self.vk_DFDE[g], v, k)
            if self.ov_FDDF:
                put(self.oq_FDDE[h], o, q)
                put(self.ok_FDDE[h], o, k)
                put(self.ov_FDDF[h], o, v)
        return whole


def attention_hessian(
    heads: Heads,
    x_LD: Float[Tensor, "L D"],
    g_LD: Float[Tensor, "L D"],
    *,
    mask: Mask | None = None,
    output: bool = True,
) -> AttentionHessian:
    """Return all blocks of ∇²⟨g, y⟩ in W_Q, W_K, W_V and, with ``output``, W_O.

    Sequences add: sum the answers over a batch.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1)
        >>> heads = Heads(w_q_HDE=one, w_k_GDE=one, w_v_GDF=one, w_o_HFD=one)
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> attention_hessian(heads, x, torch.ones(2, 1)).qq_DEDE[0].shape
        torch.Size([1, 1, 1, 1])
    """
    at = plain_attention(heads, x_LD, mask=mask)
    x_LD = x_LD.to(at.p_HQK.dtype)
    parts = [
        _head(at, x_LD, g_LD.to(x_LD), h, output=output) for h in range(len(at.p_HQK))
    ]
    qq, qk, kk, vq, vk, *out = zip(*parts, strict=True)
    times = len(parts) // len(heads.w_k_GDE)
    oq, ok, ov = out if output else ((), (), ())
    return AttentionHessian(
        qq_DEDE=qq,
        qk_DEDE=qk,
        kk_DEDE=_shared(kk, times),
        vq_DFDE=vq,
        vk_DFDE=_shared(vk, times),
        oq_FDDE=oq,
        ok_FDDE=ok,
        ov_FDDF=ov,
    )


def _shared(blocks: Blocks, times: int) -> Blocks:
    starts = range(0, len(blocks), times)
    return tuple(reduce(add, blocks[at : at + times]) for at in starts)


def _head(
    at: AttentionForward, x_LD: Tensor, g_LD: Tensor, h: int, *, output: bool
) -> list[Tensor]:
    """Return one head's blocks, summed over chunks of its queries."""
    L, D = x_LD.shape
    rotary = at.heads.rotary
    per_query = max(D, at.q_HQE.shape[-1]) ** 2 * (1 if rotary is None else L)
    step = max(1, _BUDGET // per_query)
    found = []
    for i in range(0, L, step):
        part = at.some(heads=slice(h, h + 1), queries=slice(i, i + step))
        queries = queries_of(part, x_LD, g_LD)
        found.append(
            plain_blocks(queries, output=output)
            if rotary is None
            else rotated_blocks(queries, rotary, output=output)
        )
    return [reduce(add, parts) for parts in zip(*found, strict=True)]
