"""Rounding to a narrower format, exactly, inside a wider one.

Axes, in this file: x any.

The wide dtype is float32 or float64; the result stays in it. Adding a number large
enough pushes the bits below one quantum of the format out, half to even, and takes them
with it when it is subtracted again; where so large a number overflows, the bits are
rounded as an integer. torch's own
``.to(dtype)`` rounds float64 to float16 and bfloat16 *twice* (through float32), and its
overflow rule for fp8 has changed between releases: neither is relied upon.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.formats import Format

# Wide dtype → (the integer dtype of its size, its significand bits, its exponent bits).
_WIDE = {
    torch.float32: (torch.int32, 24, 8),
    torch.float64: (torch.int64, 53, 11),
}
# float32 → narrow → float32 is one correct rounding in torch, and the fastest.
_NATIVE = {"fp16": torch.float16, "bf16": torch.bfloat16}
PIECE = 1 << 15
"""Entries rounded at a time: four copies fit a core's cache."""


def rounded(
    x: Float[Tensor, "*x"], format: Format, *, saturate: bool = False
) -> Float[Tensor, "*x"]:
    """Return fl(x): the nearest number of the format, ties to even.

    Args:
        x: float32 or float64, at least as wide as the format; keeps its dtype.
        format: the narrow format.
        saturate: clamp at ±largest instead of following ``format.overflow``.
            Infinities follow the same rule; NaN stays NaN.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> rounded(torch.tensor([1 / 3, 500.0, 1e-9]), FORMATS["e4m3"])
        tensor([3.4375e-01, 4.4800e+02, 0.0000e+00])
    """
    if _is_own(x, format):
        return x
    native = _NATIVE.get(format.name) if x.dtype == torch.float32 else None
    if native is not None and not saturate:
        return x.to(native).to(x.dtype)
    if x.numel() <= 2 * PIECE or not x.is_contiguous():
        return _within_range(_nearest(x, format), format, saturate)
    return _by_pieces(x, format, saturate)


def stochastically_rounded(
    x: Float[Tensor, "*x"], format: Format, *, generator: torch.Generator
) -> Float[Tensor, "*x"]:
    """Return one of the two neighbours of x, drawn so that the mean is x.

    The neighbour away from zero is taken with probability (|x| - ⌊|x|⌋)/ulp.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.full((4000,), 1.03)
        >>> y = stochastically_rounded(x, FORMATS["e4m3"], generator=g)
        >>> y.unique().tolist(), round(y.mean().item(), 2)
        ([1.0, 1.125], 1.03)
    """
    if _is_own(x, format):
        return x
    step = ulp(x, format)
    low = torch.trunc(x / step) * step
    up = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    moved = torch.where(up < (x - low).abs() / step, low + step.copysign(x), low)
    return _within_range(torch.where(x.isfinite(), moved, x), format, saturate=False)


def ulp(x: Float[Tensor, "*x"], format: Format) -> Float[Tensor, "*x"]:
    """Return the spacing of the format at x; below the normal range, the floor there.

    Example:
        >>> from equipoise.numerics.formats import FORMATS
        >>> ulp(torch.tensor([1.0, 3.0, 0.0]), FORMATS["e4m3"])
        tensor([0.1250, 0.2500, 0.0020])
    """
    ints, wide, _ = _wide(x)
    exponent_only = torch.where(x.isfinite(), x.abs(), torch.ones_like(x))
    power = ((exponent_only.view(ints) >> (wide - 1)) << (wide - 1)).view(x.dtype)
    return power.clamp(min=format.smallest_normal) * format.spacing


def rounding_variance(x: Float[Tensor, "*x"], format: Format) -> Float[Tensor, "*x"]:
    """Return w(x) = (fl(x) - x)², the squared residual of rounding x once.

    On average over a binade it is ulp²/12, the textbook variance; unlike that it is 0
    for numbers the format holds exactly (zeros, gains of 1), and x² for those flushed
    to zero. Infinite entries (masked scores) count as exact.
    """
    near = rounded(x, format)
    return torch.where(x.isinf(), 0.0, near - x).square()


def power_of_two_scale(x: Float[Tensor, "*x"], format: Format) -> float:
    """Return 2^k that brings the largest |x| just inside the format: exact to undo."""
    if x.numel() == 0:
        return 1.0
    low, high = torch.aminmax(x.detach())
    top = max(-float(low), float(high))
    if top == 0 or not math.isfinite(top):  # nothing to scale, or nothing to save
        return 1.0
    return 2.0 ** math.floor(math.log2(format.largest) - math.log2(top))


def _by_pieces(x: Tensor, format: Format, saturate: bool) -> Tensor:
    """Return fl(x), a piece at a time: no memory is fetched for the steps between.

    Pieces that hold float32's numbers (weights, widened) are rounded by torch, until
    one does not.
    """
    near = torch.empty_like(x)
    native = None if saturate else _NATIVE.get(format.name)
    pieces = zip(x.view(-1).split(PIECE), near.view(-1).split(PIECE), strict=True)
    for some, into in pieces:
        if native is not None:
            narrower = some.float()
            if bool((narrower == some).all()):
                into.copy_(narrower.to(native))
                continue
            native = None
        into.copy_(_within_range(_nearest(some, format), format, saturate))
    return near


def _nearest(x: Tensor, format: Format) -> Tensor:
    """Return x on the format's grid; beyond its range, beyond it still."""
    _, wide, _ = _wide(x)
    room = _headroom(x, format) - (wide - format.significand) - 1
    return _pushed(x, format) if room >= 0 else _masked(x, format)


def _headroom(x: Tensor, format: Format) -> int:
    """Return how many binades x's dtype reaches beyond the format."""
    _, _, exponent = _wide(x)
    return int(2 ** (exponent - 1)) - 1 - _top(format)


def _top(format: Format) -> int:
    """Return the exponent of the largest number."""
    return format.bias + (1 if format.finite_only else 0)


def _pushed(x: Tensor, format: Format) -> Tensor:
    """Return (x + p) - p with p = 1.5·2^(wide-1) quanta of the format at x."""
    ints, wide, exponent = _wide(x)
    mask = ((1 << exponent) - 1) << (wide - 1)
    power = (x.view(ints) & mask).view(x.dtype)
    power.clamp_(format.smallest_normal, 2.0 ** _top(format))
    push = power.mul_(1.5 * 2.0 ** (wide - 1) * format.spacing)
    return (x + push).sub_(push).copysign_(x)


def _masked(x: Tensor, format: Format) -> Tensor:
    ints, wide, _ = _wide(x)
    drop = wide - format.significand
    bits = x.view(ints)
    near = x
    if drop:
        odd = (bits >> drop) & 1
        near = ((bits + ((1 << (drop - 1)) - 1) + odd) & -(1 << drop)).view(x.dtype)
    push = 1.5 * 2.0 ** (wide - 1) * format.smallest_subnormal
    tiny = x.abs() < format.smallest_normal
    flushed = ((x + push) - push).copysign(x)
    return torch.where(tiny, flushed, torch.where(x.isfinite(), near, x))


def _within_range(near: Tensor, format: Format, saturate: bool) -> Tensor:
    if saturate or format.overflow == "saturate":
        return near.clamp_(-format.largest, format.largest)
    if format.finite_only:  # numbers of the last code lie in a binade with others
        return torch.where(near.abs() > format.largest, near * math.inf, near)
    # Beyond `largest` is the next power of two or more: let the wide dtype overflow.
    # Multiplications take a tenth of the time of comparisons.
    beyond = 2.0 ** _headroom(near, format)
    return near.mul_(beyond).div_(beyond)


def _wide(x: Tensor) -> tuple[torch.dtype, int, int]:
    if x.dtype not in _WIDE:
        raise InputError(
            f"rounding starts from float32 or float64, got {x.dtype}; widen it first"
        )
    return _WIDE[x.dtype]


def _is_own(x: Tensor, format: Format) -> bool:
    """Return whether x's dtype is the format already; refuse one that is narrower."""
    _, significand, exponent = _wide(x)
    if format.significand > significand or format.exponent > exponent:
        raise InputError(f"{x.dtype} cannot hold {format.name}: give float64")
    return (significand, exponent) == (format.significand, format.exponent)
