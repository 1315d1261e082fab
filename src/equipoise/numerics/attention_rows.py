"""What an instrument reads off attention scores: θ, logits, entropy, sink, per row.

Axes, in this file:  x any leading axes · N row · K key.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics import (
    attention_rows_cpu,
    balance_cpu,
    balance_ladder,
    balance_torch,
)
from equipoise.numerics.balance_compile import COMPILED, over_rows
from equipoise.numerics.balance_fill import OPEN
from equipoise.numerics.balance_ladder import DEPTH

# |p(S) - ½| that is small enough here: θ is then within 1e-6 of 1.
_ENOUGH = 2.0**-11
_OPTIONS = (_ENOUGH, float("inf"), DEPTH)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """One number per row of scores, in float32 (float64 for float64 scores)."""

    theta_lower: Float[Tensor, "*x"]
    theta_upper: Float[Tensor, "*x"]
    max_logit: Float[Tensor, "*x"]
    """-inf where no key is visible."""
    entropy: Float[Tensor, "*x"]
    """In nats."""
    sink: Float[Tensor, "*x"]
    """Mass of key 0."""
    p_max: Float[Tensor, "*x"]
    """Largest mass of any key."""
    score_square: Float[Tensor, "*x"]
    """Σz² over visible keys."""
    mass_square: Float[Tensor, "*x"]
    """Σp²."""
    visible: Int[Tensor, "*x"]
    """Keys with a score above -inf."""

    @property
    def jacobian_norm(self) -> Float[Tensor, "*x"]:
        """‖∂ softmax‖₂ from above, within 2×: p_max, or 2 p_max(1 - p_max) past ½."""
        p = self.p_max
        return torch.where(p > 0.5, (2 * p * (1 - p)).clamp(max=0.5), p)

    @property
    def counted(self) -> Bool[Tensor, "*x"]:
        """Rows over which θ is read: at least two visible keys."""
        return self.visible >= 2


def row_statistics(scores: Float[Tensor, "*x K"]) -> RowStatistics:
    """Return θ, max logit, entropy, sink mass and visible keys of every row of scores.

    θ = 4 max_S p(S) p(Sᶜ),  H = log Z - Σ p (z - z_max),  p = softmax(z), where scores
    include the model's scale and -inf marks a masked key. On the CPU one compiled pass
    reads each row once; elsewhere torch operations that never synchronise.

    Args:
        scores: A block of scores, for instance (B, H, q, K). float16, bfloat16 (read
            in float32), float32 or float64.

    Returns:
        θ's interval is at most 1e-6 wide on the CPU, except for rows too hard to close;
        on other devices ``theta_upper`` is 1 unless one key holds half of the mass.
        Rows with fewer than two visible keys have θ = 0 and are not ``counted``. A NaN
        or +inf score makes its row NaN.

    Example:
        >>> z = torch.tensor([[0.0, 0.0, -torch.inf], [2.0, 2.0, 2.0]])
        >>> read = row_statistics(z)
        >>> read.theta_lower, read.visible
        (tensor([1.0000, 0.8889]), tensor([2, 3], dtype=torch.int32))
    """
    if scores.dtype not in _FLOATS or scores.ndim == 0 or scores.shape[-1] == 0:
        raise InputError(
            f"scores must be a float tensor with at least one key on the last axis, "
            f"not {scores.dtype} of shape {tuple(scores.shape)}"
        )
    z_NK = scores.detach().reshape(-1, scores.shape[-1])
    if z_NK.dtype != torch.float64:
        z_NK = z_NK.float()
    quick = COMPILED and z_NK.device.type == "cpu" and z_NK.dtype == torch.float32
    out_NC = _on_cpu(z_NK) if quick else _in_torch(z_NK)
    out_xC = out_NC.view(*scores.shape[:-1], attention_rows_cpu.COLUMNS)
    *columns, visible = out_xC.unbind(-1)
    names = [field.name for field in fields(RowStatistics)][:-1]
    read = {n: c.to(z_NK.dtype) for n, c in zip(names, columns, strict=True)}
    return RowStatistics(**read, visible=visible.int())


def _on_cpu(z_NK: Tensor) -> Tensor:
    z = z_NK.contiguous().numpy()
    out_NC = np.empty((len(z), attention_rows_cpu.COLUMNS))

    def work(start: int, stop: int) -> None:
        rows, out = z[start:stop], out_NC[start:stop]
        attention_rows_cpu.statistics(rows, out, _OPTIONS)
        left = np.flatnonzero(out[:, 0] == OPEN)
        if left.size:
            open_rows = rows[left].astype(np.float64)
            p = np.exp(open_rows - out[left, attention_rows_cpu.MAX_LOGIT, None])
            out[left, :2] = balance_cpu.intervals(p, None, _OPTIONS)

    over_rows(work, *z.shape)
    return torch.from_numpy(out_NC)


def _in_torch(z_NK: Tensor) -> Tensor:
    visible = (z_NK > -torch.inf).sum(-1)
    dark = (visible == 0)[:, None]
    lit_NK = z_NK.masked_fill(dark, 0.0)
    top = lit_NK.amax(-1)
    p_NK = lit_NK.softmax(-1)
    far = (lit_NK - top[:, None]).clamp(min=torch.finfo(z_NK.dtype).min)
    entropy = torch.logsumexp(lit_NK - top[:, None], -1) - (p_NK * far).sum(-1)
    lower, upper = _theta(p_NK)
    seen_NK = lit_NK.masked_fill(lit_NK == -torch.inf, 0.0)
    squares = seen_NK.square().sum(-1), p_NK.square().sum(-1)
    columns = (lower, upper, top, entropy, p_NK[:, 0], p_NK.amax(-1), *squares)
    read = torch.stack(columns, -1)
    read = read.masked_fill(dark, 0.0)
    read[:, 2].masked_fill_(dark[:, 0], -torch.inf)
    return torch.cat([read, visible[:, None].to(read.dtype)], -1)


def _theta(p_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return θ's bounds; rows left open are searched only where that needs no sync."""
    if COMPILED and p_NK.device.type == "cpu":
        bounds_N2 = balance_torch.intervals(p_NK, None, _OPTIONS).to(p_NK.dtype)
        return bounds_N2[:, 0], bounds_N2[:, 1]
    lower, upper, _ = balance_torch.vectorised(p_NK)
    return lower, upper


def warm_up() -> None:
    """Compile, or load from the cache, the kernels of ``row_statistics``."""
    balance_ladder.warm_up()  # rows left open are finished by the ladder
    row_statistics(torch.zeros(1, 3))
