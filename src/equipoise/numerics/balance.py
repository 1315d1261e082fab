"""The balanced-mass factor θ of attention rows, as a certified interval.

    θ(p) = 4 · max_S p(S) (1 - p(S)),      ‖∂ softmax‖_{∞→1} = θ(p) / τ.

Axes, in this file:  x any leading axes · K key.
Emadi (2026), Def. 4.1 and Thm 4.2. Finding the best S is number partitioning: hard in
general, easy in almost every row that attention produces.
"""

from jaxtyping import Float
from torch import Tensor

from equipoise.numerics.balance_ladder import Balance, intervals, warm_up
from equipoise.numerics.balance_sensitivity import sensitivity

__all__ = ["Balance", "balance", "sensitivity", "warm_up"]


def balance(p: Float[Tensor, "*x K"], *, witness: bool = False) -> Balance:
    """Return θ of every row: a value some subset attains, and one none exceeds.

    θ = 4 p(S) p(Sᶜ) / (Σp)², the smaller side summed directly, in float64. Rows climb
    a ladder and stop at the first step that closes them: p_max ≥ ½ (then S = {top});
    one filling pass; largest-first, differencing and swaps; meet-in-the-middle over the
    largest keys with the mass of the others as slack, complete up to 40 keys.

    Args:
        p: Attention rows; masked keys are exact zeros. float16, bfloat16, float32 or
            float64, on any device.
        witness: Also return a subset that attains ``lower``.

    Returns:
        Bounds in float64 for float64 rows, else in float32, rounded outwards. A row
        with a NaN, a negative entry, or a sum off 1 by more than K·ε of its dtype
        (2⁻⁷ at least for 16-bit rows, 2⁻⁴ at most) reads NaN, and only that row.

    Example:
        >>> import torch
        >>> found = balance(torch.tensor([[0.4, 0.1, 0.4, 0.1], [0.9, 0.1, 0.0, 0.0]]))
        >>> found.lower, found.exact
        (tensor([1.0000, 0.3600]), tensor([True, True]))
    """
    return intervals(p, witness=witness)
