"""Slow, obvious attention and its Jacobian: float64, loops, complex numbers, autograd.

Shares no formula with ``equipoise.theory.lipschitz``: nothing here splits a Jacobian
into paths. It differentiates a forward pass written one query at a time.

Axes, in this file:  H head · L token · D width of the model · i query · j key.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacrev

from equipoise.theory.lipschitz.heads import HeadNorm, Heads, Rotary

Map = Callable[[Tensor], Tensor]


def _rotated(u_LE: Tensor, rotary: Rotary | None) -> Tensor:
    if rotary is None:
        return u_LE
    width, length = rotary.cos_LR.shape[-1], len(u_LE)
    turn = torch.complex(rotary.cos_LR, rotary.sin_LR)[:length]
    head, tail = u_LE[:, :width], u_LE[:, width:]
    if rotary.interleaved:
        z = torch.complex(head[:, 0::2], head[:, 1::2]) * turn[:, 0::2]
        turned = torch.view_as_real(z).flatten(1)
    else:
        half = width // 2
        z = torch.complex(head[:, :half], head[:, half:]) * turn[:, :half]
        turned = torch.cat([z.real, z.imag], 1)
    return torch.cat([turned, tail], 1)


def _normed(u_LE: Tensor, norm: HeadNorm | None) -> Tensor:
    if norm is None:
        return u_LE
    shape = u_LE.shape[-1:]
    gain = None if norm.gain_E is None else norm.gain_E.double()
    if norm.centred:
        return F.layer_norm(u_LE, shape, gain, None, norm.eps)
    return F.rms_norm(u_LE, shape, gain, norm.eps)


def _projected(x: Tensor, w: Tensor, b: Tensor | None, n: int) -> Tensor:
    return F.linear(x, w[n].double().T, None if b is None else b[n].double())


def _scores(heads: Heads, q: Tensor, k: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.5 if heads.scale is None else heads.scale
    z = torch.stack([scale * q.dot(k_j) for k_j in k])
    if heads.softcap is not None:
        z = heads.softcap * torch.tanh(z / heads.softcap)
    return z / heads.temperature


def _hidden(z: Tensor, i: int, seen: Tensor | None, causal: bool) -> Tensor:
    if seen is not None and seen.dtype == torch.bool:
        z = z.where(seen[i], -torch.inf)
    elif seen is not None:
        z = z + seen[i]
    return z.where(torch.arange(len(z)) <= i, -torch.inf) if causal else z


def _mixed(z: Tensor, v: Tensor) -> Tensor:
    if (z == -torch.inf).all():
        return torch.zeros_like(v[0])
    return torch.einsum("j,jf->f", torch.softmax(z, 0), v)


def attention(heads: Heads, mask: Tensor | None = None) -> Map:
    """Return x ↦ attention output, one head and one query at a time, in float64."""
    H, G = len(heads.w_q_HDE), len(heads.w_k_GDE)

    def forward(x_LD: Tensor) -> Tensor:
        L = len(x_LD)
        seen_HLL = [None] * H if mask is None else mask.broadcast_to(H, L, L)
        out = torch.zeros_like(x_LD)
        for h in range(H):
            g = h * G // H
            q = _projected(x_LD, heads.w_q_HDE, heads.b_q_HE, h)
            k = _projected(x_LD, heads.w_k_GDE, heads.b_k_GE, g)
            v = _projected(x_LD, heads.w_v_GDF, heads.b_v_GF, g)
            q = _rotated(_normed(q, heads.q_norm), heads.rotary)
            k = _rotated(_normed(k, heads.k_norm), heads.rotary)
            z = [_scores(heads, q_i, k) for q_i in q]
            z = [_hidden(z[i], i, seen_HLL[h], heads.causal) for i in range(L)]
            out = (
                out
                + torch.stack([_mixed(z_i, v) for z_i in z]) @ heads.w_o_HFD[h].double()
            )
        return out

    return forward


def l2_attention(w_q_HDE: Tensor, w_v_HDF: Tensor, w_o_HFD: Tensor) -> Map:
    """Return Kim et al.'s L2 attention, tied queries and keys, A = W_Q W_Qᵀ/√E."""

    def forward(x_LD: Tensor) -> Tensor:
        out = torch.zeros_like(x_LD)
        for w_q, w_v, w_o in zip(w_q_HDE, w_v_HDF, w_o_HFD, strict=True):
            root = w_q.shape[-1] ** 0.5
            gap = (x_LD @ w_q)[:, None] - (x_LD @ w_q)[None]
            p_LL = torch.softmax(-gap.square().sum(-1) / root, -1)
            out = out + p_LL @ x_LD @ (w_q @ w_q.T / root) @ w_v @ w_o
        return out

    return forward


def jacobian(f: Map, x_LD: Tensor) -> Tensor:
    """Return J_ijcd = dy_ic / dx_jd by reverse-mode autograd, in float64."""
    return jacrev(f)(x_LD.double()).permute(0, 2, 1, 3)


def block_norms(J_ijcd: Tensor) -> Tensor:
    """Return the spectral norm of every block, by dense SVD."""
    return torch.linalg.svdvals(J_ijcd)[..., 0]


def block_inf_lower(J_ijcd: Tensor, steps: int = 60, starts: int = 3) -> float:
    """Return the best max_i ‖Σ_j J_ij z_j‖ found with ‖z_j‖ = 1: a lower bound.

    Alternates z_j ∝ J_ijᵀ y and y ∝ Σ_j J_ij z_j; each step can only increase it.
    """
    rng = torch.Generator().manual_seed(0)
    best = 0.0
    for J_jcd in J_ijcd:
        y_sc = torch.randn(starts, J_jcd.shape[1], generator=rng, dtype=J_jcd.dtype)
        # One start from the strongest block: random ones can miss a lone large one.
        strongest = J_jcd[J_jcd.flatten(1).norm(dim=1).argmax()]
        y_sc = torch.cat([y_sc, torch.linalg.svd(strongest).U[:, 0][None]])
        for _ in range(steps):
            z_sjd = F.normalize(torch.einsum("jcd,sc->sjd", J_jcd, y_sc), dim=-1)
            y_sc = torch.einsum("jcd,sjd->sc", J_jcd, z_sjd)
            value, y_sc = y_sc.norm(dim=-1).max().item(), F.normalize(y_sc, dim=-1)
        best = max(best, value)
    return best


def frobenius(J_ijcd: Tensor) -> float:
    """Return the spectral norm of the whole Jacobian, by dense SVD."""
    whole = J_ijcd.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    return torch.linalg.matrix_norm(whole, ord=2).item()
