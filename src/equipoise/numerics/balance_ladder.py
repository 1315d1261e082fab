"""θ of whole tensors: checks what was given, picks the kernel, rounds outwards.

Axes, in this file:  x any leading axes · N row · K key.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics import balance_cpu, balance_torch
from equipoise.numerics.balance_compile import COMPILED
from equipoise.numerics.balance_fill import Options

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
# Devices whose rows are measured on the CPU, and the answer sent back.
_WITHOUT_FLOAT64 = {"mps"}
# 16-bit rows are upcast this many entries at a time.
_CHUNK = 1 << 22
# How many keys a complete search may hold: 2²⁰ sums in each half, 2¹⁰ if interpreted.
DEPTH = 40 if COMPILED else 20


@dataclass(frozen=True, slots=True)
class Balance:
    """θ of every row as a certified interval."""

    lower: Float[Tensor, "*x"]
    """Attained by a subset of keys, up to the last bit of the result."""
    upper: Float[Tensor, "*x"]
    """Proven: no subset exceeds it."""
    exact: Bool[Tensor, "*x"]
    """The two agree to the rounding of the computation."""
    witness: Bool[Tensor, "*x K"] | None = None
    """A subset that attains ``lower``, when asked for."""


def enough(dtype: torch.dtype) -> float:
    """Return the |p(S) - ½| at which θ is one unit in the last place below 1."""
    return float((torch.finfo(dtype).eps / 8) ** 0.5)


def mass_tolerance(dtype: torch.dtype, keys: int) -> float:
    """Return how far Σp may be from 1: K·ε, at least 2⁻⁷ for 16-bit rows.

    Capped at 2⁻⁴: with K·ε alone a long bfloat16 row could sum to anything.
    """
    least = 2.0**-7 if dtype in _NARROW else 0.0
    return min(max(keys * torch.finfo(dtype).eps, least), 2.0**-4)


def checked(p_xK: Tensor) -> Tensor:
    """Return the rows detached, or say what cannot be read."""
    if p_xK.dtype not in _WIDE + _NARROW:
        raise InputError(
            f"attention rows must be float16, bfloat16, float32 or float64, not "
            f"{p_xK.dtype}: convert them first, e.g. p.float()"
        )
    if p_xK.ndim == 0 or p_xK.shape[-1] == 0:
        raise InputError(
            f"attention rows need at least one key on the last axis; got shape "
            f"{tuple(p_xK.shape)}"
        )
    return p_xK.detach()


def outward(bounds_N2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return lower rounded down and upper rounded up to the result's dtype."""
    lower, upper = bounds_N2.unbind(-1)
    low, high = lower.to(dtype), upper.to(dtype)
    zero, one = torch.zeros_like(low), torch.ones_like(high)
    low = torch.where(low.to(lower.dtype) > lower, torch.nextafter(low, zero), low)
    high = torch.where(high.to(upper.dtype) < upper, torch.nextafter(high, one), high)
    return low, high


def _on_cpu(p_NK: Tensor, mask_NK: Tensor | None, options: Options) -> Tensor:
    """Return the bounds of the compiled kernel; 16-bit rows are upcast in chunks."""
    wide = torch.promote_types(p_NK.dtype, torch.float32)
    size = max(1, len(p_NK) if p_NK.dtype == wide else _CHUNK // p_NK.shape[-1])
    found = [np.empty((0, 2))]
    for i in range(0, len(p_NK), size):
        rows = p_NK[i : i + size].to(wide).contiguous().numpy()
        mask = None if mask_NK is None else mask_NK[i : i + size].numpy()
        found.append(balance_cpu.intervals(rows, mask, options))
    return torch.from_numpy(np.concatenate(found))


def _witness(mask_NK: Tensor, p_NK: Tensor, low_N: Tensor) -> Tensor:
    """Return the subset without masked keys, and none for a row that reads NaN."""
    return (mask_NK != 0) & (p_NK > 0) & ~low_N.isnan()[:, None]


def intervals(p_xK: Tensor, *, witness: bool) -> Balance:
    """Return the certified interval of every row; see ``balance`` for the contract."""
    p_xK, home = checked(p_xK), p_xK.device
    if home.type in _WITHOUT_FLOAT64:
        p_xK = p_xK.cpu()
    dtype = torch.promote_types(p_xK.dtype, torch.float32)
    p_NK = p_xK.reshape(-1, p_xK.shape[-1])
    mask_NK = p_NK.new_zeros(p_NK.shape, dtype=torch.uint8) if witness else None
    options = (enough(dtype), mass_tolerance(p_NK.dtype, p_NK.shape[-1]), DEPTH)
    compiled = p_NK.device.type == "cpu" and COMPILED
    kernel = _on_cpu if compiled else balance_torch.intervals
    bounds_N2 = kernel(p_NK, mask_NK, options)
    low, high = outward(bounds_N2, dtype)
    exact = high - low <= 2 * torch.finfo(dtype).eps * high
    lead = p_xK.shape[:-1]
    return Balance(
        low.view(lead).to(home),
        high.view(lead).to(home),
        exact.view(lead).to(home),
        None
        if mask_NK is None
        else _witness(mask_NK, p_NK, low).reshape(p_xK.shape).to(home),
    )


def warm_up() -> None:
    """Compile, or load from the cache, every CPU kernel this file can call."""
    if COMPILED:
        for dtype in (np.float32, np.float64):
            row = np.ones((1, 1), dtype)
            balance_cpu.intervals(row, None, (0.0, 0.0, DEPTH))
