"""Floating-point formats: what each can hold, and how finely.

A format keeps t significand bits (the leading one included) and e exponent bits.
Two conventions for "machine epsilon" are in print, a factor 2 apart. Here

    unit_roundoff = 2^-t        the largest relative error of one rounding (ours),
    spacing       = 2^(1-t)     the gap above 1, ``torch.finfo.eps`` (Baek v1).

No torch here: ``equipoise plan`` reads formats on machines without it. ``rounding``
rounds tensors to them.
"""

from dataclasses import dataclass
from typing import Literal

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
