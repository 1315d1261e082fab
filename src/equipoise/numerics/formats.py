"""Floating-point formats: what each can hold, how finely, and rounding to one.

Axes, in this file:  x any.

A format keeps t significand bits (the leading one included) and e exponent bits.
Two conventions for "machine epsilon" are in print, a factor 2 apart. Here

    unit_roundoff = 2^-t        the largest relative error of one rounding (ours),
    spacing       = 2^(1-t)     the gap above 1, ``torch.finfo.eps`` (Baek v1).

Rounding is exact and stays inside a wider dtype, float32 or float64. Adding a number
large enough pushes the bits below one quantum of the format out, half to even, and
takes them with it when it is subtracted again; where so large a number overflows, the
bits are rounded as an integer. torch's own ``.to(dtype)`` rounds float64 to float16 and
bfloat16 *twice* (through float32), and its overflow rule for fp8 has changed between
releases: neither is relied upon.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point format with subnormals.

    Example:
        >>> half = FORMATS["fp16"]
        >>> half.unit_roundoff == 2**-11, half.largest, half.smallest_subnormal
        (True, 65504.0, 5.960464477539063e-08)
    """

    name: str
    significand: int
    """Significand bits t, counting the implicit leading one."""
    exponent: int
    """Exponent bits."""
    overflow: Literal["inf", "saturate"] = "inf"
    """What lies beyond ``largest``: infinity, or the largest number itself."""
    finite_only: bool = False
    """The top exponent holds numbers too, all but the last code (fp8 e4m3fn)."""

    def __post_init__(self) -> None:
        if not (2 <= self.significand <= 53 and 2 <= self.exponent <= 11):
            raise InputError(
                f"format {self.name!r}: needs 2-53 significand bits and 2-11 exponent "
                f"bits, got {self.significand} and {self.exponent}"
            )

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.significand

    @property
    def spacing(self) -> float:
        return 2.0 ** (1 - self.significand)

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent - 1)) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * self.spacing

    @property
    def largest(self) -> float:
        """Return the largest finite number; e4m3fn gives up its last code to NaN."""
        top = 2.0**self.bias * (2 - self.spacing)
        if not self.finite_only:
            return top
        return 2.0 ** (self.bias + 1) * (2 - 2 * self.spacing)

    @property
    def bits(self) -> int:
        return self.significand + self.exponent


FORMATS = {
    format.name: format
    for format in (
        Format(name="fp64", significand=53, exponent=11),
        Format(name="fp32", significand=24, exponent=8),
        # tf32 is the input format of a matrix product; sums and results stay fp32.
        Format(name="tf32", significand=11, exponent=8),
        Format(name="bf16", significand=8, exponent=8),
        Format(name="fp16", significand=11, exponent=5),
        Format(
            name="e4m3",
            significand=4,
            exponent=4,
            overflow="saturate",
            finite_only=True,
        ),
        Format(name="e5m2", significand=3, exponent=5),
    )
}


def format_named(name: str) -> Format:
    """Return a known format, or a generic one from ``"e<exponent>m<mantissa>"``.

    Example:
        >>> format_named("e3m2").significand, format_named("bfloat16").name
        (3, 'bf16')
    """
    known = FORMATS.get(_ALIASES.get(name, name))
    if known is not None:
        return known
    exponent, _, mantissa = name.removeprefix("e").partition("m")
    if not (name.startswith("e") and exponent.isdigit() and mantissa.isdigit()):
        raise InputError(
            f"unknown format {name!r}; known: {', '.join(FORMATS)}, or generic e5m10"
        )
    return Format(name=name, significand=int(mantissa) + 1, exponent=int(exponent))


_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "e4m3fn": "e4m3",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}

# Wide dtype → (the integer dtype of its size, its significand bits, its exponent bits).
_WIDE = {
    torch.float32: (torch.int32, 24, 8),
    torch.float64: (torch.int64, 53, 11),
}
# float32 → narrow → float32 is one correct rounding in torch, and the fastest.
_NATIVE = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
    return _within_range(_nearest(x, format), format, saturate)


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


def rounding_variance(
    x: Float[Tensor, "*x"], format: Format, *, saturate: bool = False
) -> Float[Tensor, "*x"]:
    """Return w(x) = (fl(x) - x)², the squared residual of rounding x once.

    On average over a binade it is ulp²/12, the textbook variance; unlike that it is 0
    for numbers the format holds exactly (zeros, gains of 1), and x² for those flushed
    to zero. Infinite entries (masked scores) count as exact.
    """
    near = rounded(x, format, saturate=saturate)
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
