"""flash-attn's own Python code on a CPU: its extension and operators have stand-ins.

Scores are computed one by one from the definition, so that they share no formula with
what reads the kernels.
"""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

LIBRARY = Path(sys.prefix) / "flash-attn"


def scores_of_one(q_QHD: Tensor, k_KGD: Tensor, **how: Any) -> Tensor:
    """Return (H, Q, K) of one sequence, hidden keys at -inf, entry by entry."""
    Q, H, D = q_QHD.shape
    K, G, _ = k_KGD.shape
    scale = D**-0.5 if how.get("scale") is None else how["scale"]
    out = torch.full((H, Q, K), -math.inf, dtype=torch.float64)
    for h in range(H):
        for i in range(Q):
            for j in range(K):
                if not _sees(i + K - Q, j, **how):
                    continue
                dot = torch.dot(q_QHD[i, h].double(), k_KGD[j, h * G // H].double())
                out[h, i, j] = _changed(scale * dot.item(), h, i + K - Q - j, **how)
    return out


def _sees(i: int, j: int, **how: Any) -> bool:
    left, right = how.get("left", -1), how.get("right", -1)
    if how.get("causal") and j > i:
        return False
    return not ((left >= 0 and j < i - left) or (right >= 0 and j > i + right))


def _changed(score: float, head: int, distance: int, **how: Any) -> float:
    if how.get("softcap"):
        score = how["softcap"] * math.tanh(score / how["softcap"])
    if how.get("slopes") is not None:
        score -= how["slopes"][head].item() * abs(distance)
    return score


def weights(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the attention weights of (B, H, S, D)."""
    z = scale * q @ k.mT
    if causal:
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool)
        z = z.masked_fill(hidden.triu(1 + z.shape[-1] - z.shape[-2]), -math.inf)
    return z.softmax(-1).nan_to_num()


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Return attention of (B, S, H, D), computed out of sight of any mode."""
    with DisableTorchFunction():
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        copies = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        return (weights(q, k, scale, causal) @ v).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, p: float, scale: float, causal: bool, *rest: Any
) -> tuple[Tensor, ...]:
    out = dense(q, k, v, scale, causal).contiguous()
    B, S, H, _ = q.shape
    nothing = q.new_empty(0)
    return out, q.new_zeros(B, H, S), nothing, torch.zeros(2, dtype=torch.int64)


def _each(starts_q: Tensor, starts_k: Tensor) -> list[tuple[slice, slice]]:
    ends = zip(starts_q.tolist(), starts_q.tolist()[1:], strict=False)
    others = zip(starts_k.tolist(), starts_k.tolist()[1:], strict=False)
    return [(slice(*a), slice(*b)) for a, b in zip(ends, others, strict=True)]


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, _, scale, causal, *_ = rest
    parts = [
        dense(q[None, a], k[None, b], v[None, b], scale, causal)[0]
        for a, b in _each(starts_q, starts_k)
    ]
    out = torch.cat(parts).contiguous()
    lse = q.new_zeros(q.shape[1], len(q))
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Tensor:
    """Written out: an operator runs below autograd. As many key heads as heads."""
    dq, dk, dv, _, scale, causal, *_ = rest
    do_BHQD, q, k, v = (x.transpose(1, 2) for x in (dout, q, k, v))
    a = weights(q, k, scale, causal)
    da = do_BHQD @ v.mT
    dz = scale * a * (da - (da * a).sum(-1, keepdim=True))
    for into, grad in ((dq, dz @ k), (dk, dz.mT @ q), (dv, a.mT @ do_BHQD)):
        into.copy_(grad.transpose(1, 2))
    return lse.new_zeros(lse.shape)


def flash_attn() -> ModuleType:
    """Return flash-attn 2's package, with operators that run on a CPU."""
    if "flash_attn" not in sys.modules:
        sys.modules.setdefault("flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))
        sys.path.append(str(LIBRARY))
        try:
            importlib.import_module("flash_attn")
        finally:
            sys.path.remove(str(LIBRARY))
        for name, kernel in (
            ("_flash_attn_forward", _forward),
            ("_flash_attn_varlen_forward", _varlen_forward),
            ("_flash_attn_backward", _backward),
        ):
            torch.library.register_kernel(f"flash_attn::{name}", "cpu", kernel)
    return sys.modules["flash_attn"]
