"""Attention as a function of its weights: every block of the second derivative.

Axes, in this file:  H query head · G key/value head · Q query · K key · L token ·
D, C model width · E, A width of queries and keys · F width of values.

For a query i, a_i are its weights, c_i the cotangent of its output, p_i that of its
scores, κ_ij the key as W_Q sees it and w_ij = x_j ⊗ u_ij, u_ij the query as W_K sees it
(with rotation both depend on the pair, without it on one token). With s the scale and
central moments M_b(f, h) = Σ_j b_ij (f_j − f̄)(h_j − h̄)ᵀ, f̄ = Σ_j a_ij f_j:

    QQ = s² Σ_i x_ix_iᵀ ⊗ M_p(κ, κ)          KK = s² Σ_i M_p(w, w)
    QK = s² Σ_i x_i ⊗ M_p(κ, w) + s Σ_ij p_ij x_ix_jᵀ ⊗ ∂²(q_i·k_j)
    VQ = s Σ_i c_i x_i ⊗ M_a(x, κ)           VK = s Σ_i c_i ⊗ M_a(x, w)
    OQ = s Σ_i g_i x_i ⊗ M_a(v, κ)           OK = s Σ_i g_i ⊗ M_a(v, w)
    OV = Σ_i g_i m_i ⊗ I, m_i = Σ_j a_ij x_j    VV = OO = 0

Heads do not mix; those that share keys and values add. Cost O(L·D²E²) per head.
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.curvature.attention import plainly_attended
from equipoise.numerics.curvature.attention_moments import queries_of
from equipoise.numerics.curvature.attention_plain import plain_blocks
from equipoise.numerics.curvature.attention_rotated import rotated_blocks
from equipoise.numerics.lipschitz.attended import Attended
from equipoise.numerics.lipschitz.forward import Mask
from equipoise.numerics.lipschitz.heads import Heads

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
    at = plainly_attended(heads, x_LD, mask=mask)
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
    at: Attended, x_LD: Tensor, g_LD: Tensor, h: int, *, output: bool
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
