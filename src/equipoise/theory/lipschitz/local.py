"""Our local bound, one head of attention at a time: value, key and query path.

Axes, in this file:  H head · Q query · K key · E width of queries and keys · F width
of values · A, B sides of a small matrix · x any leading axes.

Block (i,j) of a head's Jacobian is p_ij W_V W_O, plus the key path, which has rank one,

    p_ij c_ij (W_K q_i) ⊗ (v_j − o_i)W_O,

plus, for j = i, the query path  W_Q [Σ_l p_il c_il k_l ⊗ (v_l − o_i)] W_O: a weighted
covariance of keys and values. Summing norms over j and h bounds row i in block-∞ norm.

Norms of many small matrices are bounded by traces of high powers: for eigenvalues
λ ≥ 0 and k = 2^s, λ_max ≤ (Σλ^k)^{1/k} = tr(M^k)^{1/k} ≤ λ_max·A^{1/k}. Power iteration
approaches from below and certifies nothing; this approaches from above, costs s small
matrix products for a whole stack at once, and never fails to converge.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise.theory.lipschitz.bound import Bound, spectral
from equipoise.theory.lipschitz.forward import AttentionForward, attend
from equipoise.theory.lipschitz.heads import Heads


def moment_root(
    m_xAA: Float[Tensor, "*x A A"], *, squarings: int = 8
) -> Float[Tensor, "*x"]:
    """Return an upper bound on λ_max of matrices whose eigenvalues are non-negative.

    Assumes real non-negative eigenvalues (a Gram matrix, or a product of two). The
    answer is at most A^(1/2^squarings) too large: 1.9 % for A = 128 and 8 squarings.

    Example:
        >>> round(float(moment_root(torch.diag(torch.tensor([3.0, 1.0, 0.0])))), 4)
        3.0
    """
    # tr(M^k) would overflow: keep M^k at trace one, and its scale as a logarithm.
    t_x = _trace(m_xAA)
    m_xAA, log_x = m_xAA / _safe(t_x), _safe(t_x)[..., 0, 0].log()
    for _ in range(squarings):
        m_xAA = m_xAA @ m_xAA
        s_x = _safe(_trace(m_xAA))
        m_xAA, log_x = m_xAA / s_x, 2 * log_x + s_x[..., 0, 0].log()
    root_x = (log_x / 2**squarings).exp()
    return torch.where(t_x[..., 0, 0] == 0, torch.zeros_like(root_x), root_x)


def moment_norm(
    m_xAB: Float[Tensor, "*x A B"], *, squarings: int = 8
) -> Float[Tensor, "*x"]:
    """Return an upper bound on ‖m‖₂, at most min(A, B)^(1/2^(squarings+1)) too large.

    Example:
        >>> round(float(moment_norm(torch.tensor([[3.0, 0.0, 4.0]]))), 4)
        5.0
    """
    if m_xAB.shape[-2] > m_xAB.shape[-1]:
        m_xAB = m_xAB.mT
    return moment_root(m_xAB @ m_xAB.mT, squarings=squarings).sqrt()


def _trace(m_xAA: Tensor) -> Tensor:
    # Rounding can leave a trace of −1e-17 where the matrix is zero.
    return m_xAA.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)[..., None, None]


def _safe(t_x: Tensor) -> Tensor:
    return torch.where(t_x == 0, torch.ones_like(t_x), t_x)


# Keys at a time: pairs × width is the largest tensor, whatever the sequence length.
_KEYS = 1024
# Of each query matrix; 6 leave a 64 × 64 one at most 3.3 % too large.
_SQUARINGS = 6


class Paths(NamedTuple):
    """What each path can contribute to each query's output, per head."""

    value_HQ: Tensor
    key_HQ: Tensor
    query_HQ: Tensor

    @property
    def total_HQ(self) -> Tensor:
        return self.value_HQ + self.key_HQ + self.query_HQ


class _Factors(NamedTuple):
    """Triangular factors: every norm through a D-wide weight needs only E × E of it."""

    q_HEE: Tensor
    k_HEE: Tensor
    v_HFF: Tensor
    o_HFF: Tensor


def local_bound(
    heads: Heads,
    x_KD: Float[Tensor, "K D"],
    *,
    mask: Tensor | None = None,
    queries: Int[Tensor, " Q"] | None = None,
) -> Bound:
    """Return max_i Σ_h of the three paths: a local bound in block-∞ norm.

    Example:
        >>> eye = torch.eye(2)[None]
        >>> heads = Heads(w_q_HDE=0 * eye, w_k_GDE=eye, w_v_GDF=eye, w_o_HFD=eye)
        >>> bound = local_bound(heads, torch.eye(2))
        >>> round(bound.value, 6)  # uniform attention: only values
        1.0
    """
    paths = local_paths(attend(heads, x_KD, mask=mask, queries=queries))
    value = float(paths.total_HQ.sum(0).max())
    if queries is None:
        return Bound(value=value, scope="local", kind="first order", note="per head")
    note = f"per head, the worst of {len(queries)} sampled queries"
    return Bound(value=value, scope="local", kind="estimate", note=note)


def local_paths(attended: AttentionForward, *, any_rotation: bool = False) -> Paths:
    """Return the three paths of every head and query, one head in memory at a time.

    Cost: queries × keys × E² per head, like attention itself. Extra memory: queries ×
    1024 × E numbers, so a sample of queries stays cheap on any sequence.

    Args:
        attended: From ``attend`` or ``attend_captured``.
        any_rotation: Bound ‖W_K R q‖ by ‖W_K‖₂‖q‖ and the query path likewise, for
            captured q and k that were rotated by tables we do not have.
    """
    factors = _isotropic if any_rotation else _factors
    each = [
        _one_head(attended.some(heads=slice(h, h + 1)), factors)
        for h in range(len(attended.q_HQE))
    ]
    return Paths(*(torch.cat(path) for path in zip(*each, strict=True)))


def _one_head(head: AttentionForward, factors: Callable[[Heads], _Factors]) -> Paths:
    r = factors(head.heads)
    key_HQ = torch.zeros_like(head.q_HQE[..., 0])
    c_HQEF = head.q_HQE.new_zeros(*head.q_HQE.shape, head.v_HKF.shape[-1])
    for start in range(0, len(head.at_K), _KEYS):
        part = head.some(keys=slice(start, start + _KEYS))
        key_HQ = key_HQ + _key_path(part, r)
        c_HQEF = c_HQEF + covariance(part)
    query_HQEF = r.q_HEE[:, None] @ head.pulled_queries(c_HQEF) @ r.o_HFF[:, None].mT
    value_H = spectral(r.v_HFF @ r.o_HFF.mT)
    return Paths(
        value_HQ=value_H[:, None] * head.p_HQK.sum(-1),
        key_HQ=key_HQ,
        query_HQ=moment_norm(query_HQEF, squarings=_SQUARINGS),
    )


def _factors(heads: Heads) -> _Factors:
    w_q, w_k, w_v, w_o = heads.weights
    factors = (torch.linalg.qr(w, mode="r").R for w in (w_q, w_k, w_v, w_o.mT))
    return _Factors(*factors)


def _isotropic(heads: Heads) -> _Factors:
    """Return factors whose norms no rotation of queries or keys can exceed."""
    r = _factors(heads)
    eye_EE = torch.eye(r.q_HEE.shape[-1]).to(r.q_HEE)
    q_HEE, k_HEE = (spectral(w)[:, None, None] * eye_EE for w in (r.q_HEE, r.k_HEE))
    return _Factors(q_HEE, k_HEE, r.v_HFF, r.o_HFF)


def _key_path(part: AttentionForward, r: _Factors) -> Tensor:
    """Return Σ_j p_ij |c_ij| ‖(v_j − o_i)W_O‖ ‖W_K q_i‖ over the keys of this part."""
    step_HQK = torch.cdist(
        part.o_HQF @ r.o_HFF.mT,
        part.v_HKF @ r.o_HFF.mT,
        # The faster mode expands the square and cancels where values agree.
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    # The norm stays inside the sum: with rotation or QK-norm it depends on j.
    reach_HQKE = part.pulled_keys() @ r.k_HEE[:, None].mT
    reach_HQK: Tensor = torch.linalg.vector_norm(reach_HQKE, dim=-1)
    weight_HQK = part.p_HQK * part.slope_HQK.abs()
    return (weight_HQK * step_HQK * reach_HQK).sum(-1)


def covariance(part: AttentionForward) -> Float[Tensor, "H Q E F"]:
    """Return Σ_l p_il c_il k_l ⊗ (v_l − o_i): what moving q_i does to o_i."""
    weighted_HQKF = (part.p_HQK * part.slope_HQK)[..., None] * part.deviations()
    return torch.einsum("HKE,HQKF->HQEF", part.k_HKE, weighted_HQKF)
