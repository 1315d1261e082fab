"""Our local bounds of all heads of attention jointly, from loose to the exact constant.

Axes, in this file:  H, G head · Q query · K key · D, C model width (in, out) · E width
of queries and keys · F width of values · S start.

``joint_bound`` sums the heads inside norms, where they partly cancel. ``block_bound``
takes the exact norm of every block J_ij: nothing tighter only adds norms over keys.
``dual_bound`` brackets the constant itself. In block-∞ norm that of query i is
L = max over unit y of Σ_j ‖J_j y‖. Any y gives a lower bound. Any weights w_j > 0 with
Σ w_j = 1 give

    L² ≤ max over y of Σ_j ‖J_j y‖²/w_j = λ_max(Σ_j J_jᵀJ_j / w_j),

by Cauchy–Schwarz. With w_j ∝ ‖J_j y‖ at the best y the two agree whenever that y is the
top eigenvector: then L is known exactly. Otherwise w is improved: the least upper bound
is a concave maximum over mixtures of directions, which conditional gradients climb.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.theory.lipschitz.bound import Bound, Norm, spectral
from equipoise.theory.lipschitz.forward import AttentionForward, attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.lipschitz.local import covariance, moment_norm, moment_root

# Numbers in the largest temporary tensor (pairs × heads × width): 128 MiB in fp64.
_BUDGET = 2**24


def joint_bound(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return the joint-head bound, local, in block-∞ norm: the largest of its rows."""
    value = float(joint_rows(attend(heads, x_KD, mask=mask)).max())
    return Bound(value=value, scope="local", kind="first order", note="joint heads")


def joint_rows(attended: AttentionForward) -> Float[Tensor, " Q"]:
    """Return, per query, value + key + query path with the heads summed inside norms:

    Σ_j ‖Σ_h p^h_ij W_V W_O‖ + Σ_j ‖Σ_h key rank-ones‖ + ‖Σ_h query matrices‖,

    each norm replaced by a bound of it that does not need a D × D matrix per pair.
    """
    value_Q = value_path(attended)
    H, Q, K = attended.p_HQK.shape
    D = attended.heads.w_o_HFD.shape[-1]
    step = max(1, _BUDGET // (H * max(K, D) * D))
    rows = [
        _key_path(part) + _query_path(part)
        for part in (
            attended.some(queries=slice(i, i + step)) for i in range(0, Q, step)
        )
    ]
    return value_Q + torch.cat(rows)


def value_path(attended: AttentionForward) -> Float[Tensor, " Q"]:
    """Return Σ_j of the least of three bounds on ‖Σ_h p^h_ij M_h‖, M_h = W_V^h W_O^h:

    - (Σ_hg p^h p^g T_hg)^½ with T_hg the norm of M_hᵀM_g, or of M_h M_gᵀ;
    - max_h p^h · ‖[W_V]‖₂‖[W_O]‖₂, the weights of all heads side by side;
    - p̄ ‖Σ_h M_h‖ + max_h |p^h − p̄| · ‖[W_V]‖₂‖[W_O]‖₂, near-exact where heads agree.
    """
    p_HQK, heads = attended.p_HQK, attended.heads
    w_v_CD = heads.w_v_GDF.permute(0, 2, 1).flatten(0, 1)
    w_o_CD = heads.w_o_HFD.flatten(0, 1)
    stacked = spectral(w_v_CD) * spectral(w_o_CD)
    mean_QK = p_HQK.mean(0)
    spread_QK = (p_HQK - mean_QK).abs().amax(0)
    bounds = [_paired(p_HQK, t_HG) for t_HG in _overlaps(heads)]
    bounds.append(p_HQK.amax(0) * stacked)
    bounds.append(mean_QK * spectral(w_v_CD.mT @ w_o_CD) + spread_QK * stacked)
    return torch.stack(bounds).amin(0).sum(-1)


def _paired(p_HQK: Tensor, t_HG: Tensor) -> Tensor:
    return torch.einsum("HQK,HG,GQK->QK", p_HQK, t_HG, p_HQK).sqrt()


def _overlaps(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return ‖M_hᵀM_g‖₂ and ‖M_h M_gᵀ‖₂ for every pair of heads."""
    w_v, w_o = heads.w_v_GDF, heads.w_o_HFD
    r_v_HFF = torch.linalg.qr(w_v, mode="r").R
    r_o_HFF = torch.linalg.qr(w_o.mT, mode="r").R
    inner_v = torch.einsum("HDE,GDF->HGEF", w_v, w_v)
    inner_o = torch.einsum("HED,GFD->HGEF", w_o, w_o)
    left = r_o_HFF[:, None] @ inner_v @ r_o_HFF[None].mT
    right = r_v_HFF[:, None] @ inner_o @ r_v_HFF[None].mT
    return spectral(left), spectral(right)


def rank_ones(part: AttentionForward) -> tuple[Tensor, Tensor]:
    """Return a, b with Σ_h a^h_ij ⊗ b^h_ij the key path; a's K is 1 if all agree."""
    a_QKHD = torch.einsum("HQKE,HDE->QKHD", part.pulled_keys(), part.heads.w_k_GDE)
    weighted_HQKF = (part.p_HQK * part.slope_HQK)[..., None] * part.deviations()
    b_QKHD = torch.einsum("HQKF,HFD->QKHD", weighted_HQKF, part.heads.w_o_HFD)
    return a_QKHD, b_QKHD


def query_matrices(part: AttentionForward) -> Float[Tensor, "Q D D"]:
    """Return Σ_h W_Q [covariance of keys and values] W_O, as a map of x_i to y_i."""
    c_HQEF = part.pulled_queries(covariance(part))
    h = part.heads
    return torch.einsum("HDE,HQEF,HFC->QDC", h.w_q_HDE, c_HQEF, h.w_o_HFD)


def _key_path(part: AttentionForward) -> Tensor:
    """Return Σ_j ‖AᵀB‖₂ from two H × H Gram matrices: ‖AᵀB‖₂² = λ_max(AAᵀ·BBᵀ)."""
    a_QKHD, b_QKHD = rank_ones(part)
    gram_QKHH = (a_QKHD @ a_QKHD.mT) @ (b_QKHD @ b_QKHD.mT)
    return moment_root(gram_QKHH).sqrt().sum(-1)


def _query_path(part: AttentionForward) -> Tensor:
    return moment_norm(query_matrices(part))


def block_bound(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Tensor | None = None,
    norm: Norm = "block-inf",
) -> Bound:
    """Return max_i Σ_j ‖J_ij‖₂, or ‖(‖J_ij‖₂)_ij‖₂ in Frobenius norm.

    The second holds because ‖Σ_j J_ij z_j‖ ≤ Σ_j ‖J_ij‖‖z_j‖ is a matrix of numbers
    applied to a vector of lengths. Cost: one D × D eigenvalue problem per visible pair.
    """
    n_QK = block_norms(attend(heads, x_KD, mask=mask))
    whole = norm == "frobenius"
    value = spectral(n_QK) if whole else n_QK.sum(-1).max()
    return Bound(
        value=float(value),
        scope="local",
        kind="first order",
        norm=norm,
        note="exact block norms",
    )


def block_norms(attended: AttentionForward) -> Float[Tensor, "Q K"]:
    """Return ‖J_ij‖₂, the Jacobian of output i by input j, for every query and key."""
    rows = [
        torch.cat([_largest(j_KDC) for j_KDC in row_blocks(attended, i)])
        for i in range(len(attended.at_Q))
    ]
    return torch.stack(rows)


def row_blocks(attended: AttentionForward, i: int) -> Iterator[Float[Tensor, "K D C"]]:
    """Yield a query's blocks, dy_i = Σ_j dx_j J_ij, a budget of keys at a time."""
    row = attended.some(queries=slice(i, i + 1))
    own_DC = query_matrices(row)[0]
    step = max(1, _BUDGET // own_DC.numel())
    for start in range(0, len(row.at_K), step):
        part = row.some(keys=slice(start, start + step))
        j_KDC = _value_and_key_path(part)
        j_KDC[part.at_K == part.at_Q] += own_DC
        yield j_KDC


def _value_and_key_path(part: AttentionForward) -> Tensor:
    values_HDC = part.heads.w_v_GDF @ part.heads.w_o_HFD
    a_KHD, b_KHD = (t[0] for t in rank_ones(part))
    value_KDC = torch.einsum("HK,HDC->KDC", part.p_HQK[:, 0], values_HDC)
    return value_KDC + a_KHD.mT @ b_KHD


def _largest(j_KDC: Tensor) -> Tensor:
    """Return ‖J‖₂ of each block: zero where a key is hidden, NaN where one is broken.

    From the Gram matrix: squaring loses the small singular values, not the largest.
    """
    size_K = j_KDC.abs().flatten(1).sum(-1)
    n_K, sound_K = size_K.clone(), size_K.isfinite() & (size_K > 0)
    if sound_K.any():
        gram = j_KDC[sound_K] @ j_KDC[sound_K].mT
        n_K[sound_K] = torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    return n_K


_STARTS = 4
_ALTERNATIONS = 30
# Blocks the best direction does not see still need a weight; it costs half of this.
_FLOOR = 1e-4


class JointBracket(NamedTuple):
    """Per query: a value some change of the input attains, and one none exceeds."""

    lower: Tensor
    upper: Tensor


def dual_bound(
    heads: Heads, x_KD: Float[Tensor, "K D"], *, mask: Tensor | None = None
) -> Bound:
    """Return the largest upper end: within a few per cent of the local constant.

    Cost: about 8 × keys × D³ per query. For small layers, or few queries.
    """
    found = dual_rows(attend(heads, x_KD, mask=mask))
    lower, upper = float(found.lower.max()), float(found.upper.max())
    note = f"dual certificate; {lower:.6g} is attained"
    return Bound(value=upper, scope="local", kind="first order", note=note)


def dual_rows(attended: AttentionForward, *, steps: int = 8) -> JointBracket:
    """Return the bracket of every query of this attention."""
    rows = (torch.cat(list(row_blocks(attended, i))) for i in range(len(attended.at_Q)))
    brackets = [block_inf_norm(j_KDC, steps=steps) for j_KDC in rows]
    return JointBracket(*(torch.stack(ends) for ends in zip(*brackets, strict=True)))


def block_inf_norm(j_KDC: Float[Tensor, "K D C"], *, steps: int = 8) -> JointBracket:
    """Return a bracket of max ‖Σ_j z_j J_j‖₂ over ‖z_j‖₂ ≤ 1, for one row of blocks.

    Example:
        >>> found = block_inf_norm(torch.stack([torch.eye(2), 2 * torch.eye(2)]))
        >>> round(float(found.lower), 3), round(float(found.upper), 3)
        (3.0, 3.0)
    """
    size_K = j_KDC.square().sum((-2, -1)).sqrt()
    if not (size_K.sum() > 0 and size_K.isfinite().all()):
        broken = size_K.sum() * 0  # zero for a row that depends on nothing, else NaN
        return JointBracket(broken, broken)
    j_KDC, size_K = j_KDC[size_K > 0], size_K[size_K > 0]
    lower, reach_K = _alternated(j_KDC)
    square_K, upper = reach_K.square(), torch.full_like(lower, torch.inf)
    for _ in range(steps):
        w_K = square_K.sqrt() + _FLOOR * square_K.sqrt().sum() * size_K / size_K.sum()
        top, y_C = _leading(j_KDC, w_K / w_K.sum())
        upper = torch.minimum(upper, top.sqrt())
        seen_K = (j_KDC @ y_C).square().sum(-1)
        lower = torch.maximum(lower, seen_K.sqrt().sum())
        if upper <= lower * (1 + _FLOOR):
            break
        square_K = _climbed(square_K, seen_K)
    return JointBracket(torch.minimum(lower, upper), upper)


def _alternated(j_KDC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best Σ_j ‖J_j y‖ found, and its terms; each step only increases it."""
    gram_CC = torch.einsum("KDB,KDC->BC", j_KDC, j_KDC)
    y_SC = torch.linalg.eigh(gram_CC).eigenvectors.mT[-_STARTS:]
    # Blocks that share no direction make each eigenvector a saddle; their sum is not.
    y_SC = torch.cat([y_SC, y_SC.sum(0, keepdim=True)])
    for _ in range(_ALTERNATIONS):
        z_SKD = _unit(torch.einsum("KDC,SC->SKD", j_KDC, y_SC))
        y_SC = _unit(torch.einsum("SKD,KDC->SC", z_SKD, j_KDC))
    reach_SK = torch.einsum("KDC,SC->SKD", j_KDC, y_SC).square().sum(-1).sqrt()
    best = reach_SK.sum(-1).argmax()
    return reach_SK[best].sum(), reach_SK[best]


def _unit(u_xD: Tensor) -> Tensor:
    """Return u/‖u‖, and zero for zero."""
    tiny = torch.finfo(u_xD.dtype).tiny
    return torch.nn.functional.normalize(u_xD, dim=-1, eps=tiny)


def _leading(j_KDC: Tensor, w_K: Tensor) -> tuple[Tensor, Tensor]:
    m_CC = torch.einsum("KDB,KDC->BC", j_KDC / w_K[:, None, None], j_KDC)
    values, vectors = torch.linalg.eigh(m_CC)
    return values[-1].clamp_min(0), vectors[:, -1]


def _climbed(square_K: Tensor, seen_K: Tensor) -> Tensor:
    """Return the mixture of old and new directions with the largest Σ_j √(…_j)."""
    share_S = torch.linspace(0.0, 1.0, 33).to(square_K)[1:, None]
    mixed_SK = square_K + share_S * (seen_K - square_K)
    return mixed_SK[mixed_SK.clamp_min(0).sqrt().sum(-1).argmax()].clamp_min(0)
