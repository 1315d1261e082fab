"""Attention rows by one fused kernel, where the device has one; else by torch.

Axes, in this file:  B batch · H head · Q query · n chosen query · K key · C column.

On CUDA and ROCm, with triton, the rows of a call are read from its queries and keys in
one launch, and no block of scores is formed. Which keys a query sees by position is
handed over as a range for each row; what has no such form (a user's score function,
learned sinks, scores that a model computed itself) is read in blocks by torch.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.fused_kernels import KernelRows

DEVICES = {"cuda"}
"""Kinds of devices on which the kernel runs; torch calls ROCm's so too."""
DTYPES = {torch.float32, torch.float16, torch.bfloat16}
WIDEST = 256


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def kernel_rows(call: AttentionCall) -> KernelRows | None:
    """Return what the kernel needs to know of a call's rows, None if torch reads it."""
    if call.modify is None:
        rows: KernelRows | None = KernelRows(causal=call.causal)
    else:
        owner = getattr(call.modify, "__self__", None)
        rows = owner if isinstance(owner, KernelRows) else None
    if rows is None or rows.sinks_H is not None:
        return None
    # Capped after a mask was added, by the kernels themselves: not in ours.
    added = call.mask is not None and call.mask.dtype != torch.bool
    return None if added and rows.softcap else rows


def readable(call: AttentionCall) -> bool:
    """Return whether the kernel can read a call on its device."""
    q = call.q_BHQD
    if q is None or call.k_BGKD is None or call.scores_BHQK is not None:
        return False
    here = q.device.type in DEVICES and q.dtype in DTYPES and q.shape[-1] <= WIDEST
    same = call.k_BGKD.dtype == q.dtype
    return here and same and _has_triton() and kernel_rows(call) is not None


def fused_columns(call: AttentionCall, chosen_n: Tensor | None = None) -> Tensor:
    """Return (C, H, B, n) of a ``readable`` call: its rows, or the chosen ones."""
    # Here: importing it imports triton, which only a device needs.
    from equipoise.numerics.rows import triton_rows

    rows = kernel_rows(call)
    assert rows is not None and call.q_BHQD is not None and call.k_BGKD is not None
    sees_4BQ = rows.seen_keys(call.shape, device=call.q_BHQD.device)
    masked = call.mask is not None
    if masked and (first_BQ := call.first_key_BQ()) is not None:
        sees_4BQ = sees_4BQ.repeat(1, len(first_BQ) // sees_4BQ.shape[1], 1)
        sees_4BQ[3] = first_BQ
    read_CBHn = triton_rows.columns(
        call.q_BHQD,
        call.k_BGKD,
        sees_4BQ,
        scale=call.scale,
        mask=call.mask,
        slopes=rows.slopes_BH,
        softcap=rows.softcap,
        chosen_n=chosen_n,
    )
    return read_CBHn.transpose(1, 2)
