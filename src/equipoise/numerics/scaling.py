"""How initial gains and residual multipliers must shrink or grow with depth.

Needs no tensors. Sources: Emadi (2026), §6, for path lengths; Wang et al. (2022),
"DeepNet", for DeepNorm; Radford et al. (2019) for GPT-2's output gain.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from equipoise.errors import InputError

# m: how often maps multiply in the sensitive path of one attention layer. A shared map
# is met twice. Linear: φ = elu + 1, normalised, as our lab trains it; there it has no
# one exponent (from 4 at small norms towards 2 at large ones), and about 3 where a
# model starts. Without the normaliser it is 4.
PATH_LENGTH = {"standard": 4, "shared": 4, "linear": 3}
PRINTED_PATH_LENGTH = {"standard": 4, "shared": 3, "linear": 2}
"""As Emadi's §6.2 counts them: each distinct map once, and W_V W_O alone for linear."""


class DeepNorm(NamedTuple):
    """LN(skip·X + branch·f(X)), with W_V, W_O and both FFN matrices times ``gain``."""

    skip: float
    branch: float
    gain: float


class EncoderDecoder(NamedTuple):
    """DeepNorm of the two stacks of a sequence-to-sequence model."""

    encoder: DeepNorm
    decoder: DeepNorm


def path_gain(depth: int, *, maps: int = 4) -> float:
    """Return β = N^(−1/m): m maps of norm β multiply to 1/N (Emadi, §6).

    >>> path_gain(16, maps=4), path_gain(16, maps=2)
    (0.5, 0.25)
    """
    if maps < 1:
        raise InputError(f"maps {maps}: a path has at least one map")
    return float(_counted(depth) ** (-1 / maps))


def common_gain(depth: int, norms: Iterable[float]) -> float:
    """Return the factor by which to scale maps of unequal norms: Π(s·βᵢ) = 1/N.

    Only the product counts (Emadi, §6): one large norm may be paid for by the others.

    >>> round(common_gain(16, [4.0, 1.0]), 12)
    0.125
    """
    logs = [math.log(norm) if norm > 0 else math.nan for norm in norms]
    if not logs or not all(map(math.isfinite, logs)):
        raise InputError("norms: give one positive, finite norm per map of the path")
    return math.exp(-(math.log(_counted(depth)) + sum(logs)) / len(logs))


def deepnorm(depth: int) -> DeepNorm:
    """Return LN(X + αf(X)) with α = (2N)^(−1/4), the form of Emadi (2026).

    Up to the floor ε the same layer as ``deepnorm_original``, divided by its skip.

    >>> deepnorm(8).branch
    0.5
    """
    original = deepnorm_original(depth)
    return DeepNorm(skip=1.0, branch=1 / original.skip, gain=original.gain)


def deepnorm_original(depth: int) -> DeepNorm:
    """Return LN(aX + f(X)) with a = (2N)^(1/4) and gain (8N)^(−1/4).

    Wang et al. (2022), for encoder-only and decoder-only models. The gain is not for
    W_Q and W_K.

    >>> found = deepnorm_original(8)
    >>> found.skip, found.branch, round(found.gain, 6)
    (2.0, 1.0, 0.353553)
    """
    N = _counted(depth)
    return DeepNorm(skip=(2 * N) ** 0.25, branch=1.0, gain=(8 * N) ** -0.25)


def deepnorm_encoder_decoder(encoder: int, decoder: int) -> EncoderDecoder:
    """Return Wang et al.'s (2022) constants for N encoder and M decoder layers.

    Encoder: a = 0.81(N⁴M)^(1/16), b = 0.87(N⁴M)^(−1/16), fitted; their released code
    has 1/1.15 for 0.87. Decoder: a = (3M)^(1/4), b = (12M)^(−1/4).

    >>> deepnorm_encoder_decoder(6, 27).decoder.skip
    3.0
    """
    N, M = _counted(encoder), _counted(decoder)
    mixed = float(N**4 * M) ** (1 / 16)
    return EncoderDecoder(
        DeepNorm(skip=0.81 * mixed, branch=1.0, gain=0.87 / mixed),
        DeepNorm(skip=(3 * M) ** 0.25, branch=1.0, gain=(12 * M) ** -0.25),
    )


def output_gain(depth: int) -> float:
    """Return (2N)^(−1/2), GPT-2's gain on what writes to the residual stream.

    2N branches of equal variance then add up to the variance of one.

    >>> output_gain(8)
    0.25
    """
    return float((2 * _counted(depth)) ** -0.5)


def initial_std(width: int) -> float:
    """Return 0.02·√(1280/width), which keeps the operator norm of GPT-2 large.

    A Gaussian width × width matrix has norm about 2·std·√width: 1.43 at every width.
    With 0.02 at width 64 projections are too weak for anything to go wrong.

    >>> initial_std(1280)
    0.02
    """
    return 0.02 * math.sqrt(1280 / _counted(width, "width"))


def _counted(number: int, name: str = "depth") -> int:
    if number < 1:
        raise InputError(f"{name} {number}: at least 1 is needed")
    return number
