"""The balanced-mass factor θ of attention rows, as a certified interval.

    θ(p) = 4 · max_S p(S) (1 - p(S)),      ‖∂ softmax‖_{∞→1} = θ(p) / τ.

Emadi (2026), Def. 4.1 and Thm 4.2. Finding the best S is number partitioning: hard in
general, easy in almost every row that attention produces. This file checks what was
given, picks the kernel and rounds outwards.

Axes, in this file:  x leading (batch) axes · N row · K key.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.compiled import COMPILED
from equipoise.numerics.rows import ladder
from equipoise.numerics.rows.torch_rows import outward
from equipoise.records import html_table

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
# How far Σp may be from 1: θ is a quotient by (Σp)², so that rows of any dtype and of
# any earlier rounding are read; beyond it a row is not one of probabilities.
MASS_TOLERANCE = 2.0**-4


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

    def _summary(self) -> list[tuple[str, object]]:
        """Return shape, range and how many rows are exact; NaN rows are counted."""
        read = self.lower[~self.lower.isnan()]
        least, most = (read.min(), read.max()) if read.numel() else (math.nan,) * 2
        return [
            ("rows", tuple(self.lower.shape)),
            ("θ", f"{float(least):.4g} to {float(most):.4g}"),
            ("exact", f"{int(self.exact.sum())} of {self.lower.numel()}"),
            ("not a distribution (NaN)", self.lower.numel() - read.numel()),
        ]

    def __repr__(self) -> str:
        return f"Balance({', '.join(f'{n} {cell}' for n, cell in self._summary())})"

    def _repr_html_(self) -> str:
        return html_table("θ of attention rows", self._summary())


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


def intervals(p_xK: Tensor, *, witness: bool, effort: float) -> Balance:
    """Return the certified interval of every row; see ``balance`` for the contract.

    Rows of other devices are measured on the CPU: closing them waits for it anyway.
    """
    home, p_xK = p_xK.device, checked(p_xK).cpu()
    dtype = torch.promote_types(p_xK.dtype, torch.float32)
    p_NK = p_xK.reshape(-1, p_xK.shape[-1]).to(dtype).contiguous()
    side_NK = np.zeros(p_NK.shape, np.uint8) if witness else None
    # The |p(S) - ½| at which θ is one unit in the last place below 1 is small enough.
    options = ((torch.finfo(dtype).eps / 8) ** 0.5, MASS_TOLERANCE, float(effort))
    found_N2 = torch.from_numpy(ladder.intervals(p_NK.numpy(), side_NK, options))
    low, high = outward(found_N2, dtype)
    exact = high - low <= 2 * torch.finfo(dtype).eps * high
    lead = p_xK.shape[:-1]
    subset = None
    if side_NK is not None:  # no masked keys, and none of a row that reads NaN
        subset_NK = (p_NK > 0) & ~low.isnan()[:, None] & (torch.from_numpy(side_NK) > 0)
        subset = subset_NK.view(p_xK.shape).to(home)
    low, high, exact = (x.view(lead).to(home) for x in (low, high, exact))
    return Balance(low, high, exact, subset)


def _warn_of_unread(low_x: Tensor) -> None:
    """Say once per call how many rows read NaN, and why; never synchronises."""
    if low_x.device.type == "cpu" and (unread := int(low_x.isnan().sum())):
        warnings.warn(
            f"{unread} of {low_x.numel()} rows read NaN: they hold a NaN or a negative "
            f"entry, or their sum is off 1 by more than {MASS_TOLERANCE:g}; pass "
            f"probabilities, for instance scores.softmax(-1)",
            stacklevel=3,
        )


def warm_up() -> None:
    """Compile, or load from the cache, every CPU kernel that ``balance`` calls."""
    if COMPILED:
        for dtype in (np.float32, np.float64):
            ladder.intervals(np.ones((1, 1), dtype), None, (0.0, 1.0, 0.0))


def balance(
    p: Float[Tensor, "*x K"], *, witness: bool = False, effort: float = 1.0
) -> Balance:
    """Return θ of every row: a value some subset attains, and one none exceeds.

    θ = 4 p(S) p(Sᶜ) / (Σp)², the smaller side summed directly, in float64. Rows climb
    a ladder and stop at the first step that closes them: p_max ≥ ½ (then S = {top});
    a fill, and the subsets of twelve keys; sorted, largest first, swaps, counting of
    nearly equal keys; all subsets of the largest keys, with the mass of the others as
    slack. Rows of another device are sent to the CPU.

    Args:
        p: Attention rows; masked keys are exact zeros. float16, bfloat16, float32 or
            float64, on any device.
        witness: Also return a subset that attains ``lower``. Every row is then sorted.
        effort: Bound on the work per row. With 1 rows of up to 26 keys are complete and
            no row takes more than about 20 times as long as an ordinary one; with 1000
            rows of up to 40 keys are complete; 0 searches nothing. What is not closed
            by then stays an interval.

    Returns:
        Bounds in float64 for float64 rows, else in float32, rounded outwards. A row
        with a NaN, a negative entry, or a sum off 1 by more than 2⁻⁴ reads NaN, and
        only that row; one warning says how many.

    Example:
        >>> import torch
        >>> found = balance(torch.tensor([[0.4, 0.1, 0.4, 0.1], [0.9, 0.1, 0.0, 0.0]]))
        >>> found.lower, found.exact
        (tensor([1.0000, 0.3600]), tensor([True, True]))
    """
    if not 0 <= effort < float("inf"):
        raise InputError(f"effort must be a number from 0 on, not {effort}")
    found = intervals(p, witness=witness, effort=effort)
    _warn_of_unread(found.lower)
    return found
