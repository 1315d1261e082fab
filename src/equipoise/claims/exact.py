"""Counterexamples once more, in rationals or with 50 digits: rounding refutes nothing.

Each function returns the two sides of what a claim asserts, ``(at most this, this)``,
at a point. ``Claim.run`` calls it at the counterexample: the second side must exceed
the first, or the refutation does not stand. ``harmless`` is a point at which the claim
is right. Floats of a check's counterexample are rationals as they are; where a smaller
point shows the same, it is used instead. Names are those of the checks.

Claims about rounding, samples or norms of large matrices are not in this file: there is
nothing algebraic to evaluate, or (Petrov's Thm 6) only spectral norms of them.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction as Q
from math import isqrt
from typing import Any

import mpmath

Number = Any
"""A ``Fraction``, or an ``mpmath`` number of 50 digits."""
Sides = tuple[Number, Number]
DIGITS, ROOM = 50, Q(1, 10**30)
"""Digits carried, and the relative distance by which the sides must differ."""


@dataclass(frozen=True)
class Counterexample:
    """A claim's two sides as functions of a point, and two points."""

    sides: Callable[..., Sides]
    at: tuple[Any, ...]
    harmless: tuple[Any, ...]

    def evaluated(self, point: tuple[Any, ...] | None = None) -> tuple[Sides, bool]:
        """Return both sides at the point, and whether the second exceeds the first."""
        with mpmath.workdps(DIGITS):
            most, found = (
                _mp(s) if isinstance(s, Q) else s
                for s in self.sides(*(self.at if point is None else point))
            )
            room = mpmath.mpf(1) / ROOM.denominator * max(abs(most), abs(found))
            return (most, found), bool(found - most > room)


COUNTEREXAMPLES: dict[str, Counterexample] = {}
"""Claim → its counterexample; the name of a check is unique in its paper."""


def counterexample(
    paper: str, *at: Any, harmless: tuple[Any, ...]
) -> Callable[[Callable[..., Sides]], Callable[..., Sides]]:
    """Return a decorator that registers a claim's sides under the check's name."""

    def decorated(sides: Callable[..., Sides]) -> Callable[..., Sides]:
        known = Counterexample(sides, at, harmless)
        COUNTEREXAMPLES[f"{paper}.{sides.__name__}"] = known
        return sides

    return decorated


def theta(p: Sequence[Q]) -> Q:
    """Return θ from its definition: every subset.

    >>> theta([Q(1, 3)] * 3)
    Fraction(8, 9)
    """
    sums = (sum(s, Q(0)) for n in range(len(p)) for s in itertools.combinations(p, n))
    return max(4 * s * (1 - s) for s in sums)


def _prefix(p: Sequence[Q]) -> Q:
    mass = itertools.accumulate(sorted(p, reverse=True))
    return max(4 * s * (1 - s) for s in mass)


def _mp(value: Number) -> Number:
    return mpmath.mpf(value.numerator) / value.denominator


def _softmax(scores: Sequence[Number]) -> list[Number]:
    weights = [mpmath.exp(s) for s in scores]
    return [w / sum(weights) for w in weights]


@counterexample("emadi2026", 10, harmless=(2,))
def peaked_bound(keys: int) -> Sides:
    kappa = 1 - Q(1, keys)
    return 4 * kappa * (1 - kappa), theta([Q(1, keys)] * keys)


@counterexample("emadi2026", (4, 1, 4, 1), harmless=((5, 5),))
def example_row(tenths: Sequence[int]) -> Sides:
    row = [Q(n, 10) for n in tenths]
    return _prefix(row), theta(row)


@counterexample("emadi2026", (3, 3, 2, 2), harmless=((6, 2, 1, 1),))
def greedy_prefix(tenths: Sequence[int]) -> Sides:
    return example_row(tenths)


@counterexample("emadi2026", 1, harmless=(2,))
def one_throughout(visible: int) -> Sides:
    return theta([Q(1, visible)] * visible), Q(1)


@counterexample("emadi2026", Q(7, 5), Q(143, 100), harmless=(Q(0), Q(1)))
def activation_constant(x: Q, y: Q) -> Sides:
    def gelu(z: Q) -> Number:
        return _mp(z) * mpmath.ncdf(_mp(z))

    return y - x, gelu(y) - gelu(x)


@counterexample("emadi2026", 200, harmless=(1,))
def measured_theta_is_local(sharpness: int) -> Sides:
    """One head of width one on (t, 1, −1) and (−t, 1, −1), t = 0.1."""
    t = mpmath.mpf(1) / 10
    rows = [_softmax([sharpness * i * j for j in (t, 1, -1)]) for i in (t, 1, -1)]
    largest = max(4 * max(s * (1 - s) for s in (*row, row[0] + row[1])) for row in rows)
    other = _softmax([sharpness * -t * j for j in (-t, 1, -1)])
    out = [
        sum(a * x for a, x in zip(row, (s * t, 1, -1), strict=True))
        for row, s in ((rows[0], 1), (other, -1))
    ]
    return 1 + largest * 2 * sharpness, abs(out[0] - out[1]) / (2 * t)


@counterexample("emadi2026", 120, harmless=(0,))
def biases_are_not_in_the_magnitude(bias: int) -> Sides:
    """The block-∞ norm of the Jacobian of one head on (0.01, −0.01)."""
    xs = [mpmath.mpf(1) / 100, mpmath.mpf(-1) / 100]
    largest, truth = mpmath.mpf(0), mpmath.mpf(0)
    for i, x in enumerate(xs):
        a = _softmax([(x + bias) * y for y in xs])
        out = sum(p * y for p, y in zip(a, xs, strict=True))
        row = [p + p * (y - out) * (x + bias) for p, y in zip(a, xs, strict=True)]
        row[i] += sum(p * (y - out) * y for p, y in zip(a, xs, strict=True))
        truth = max(truth, sum(abs(entry) for entry in row))
        largest = max(largest, 4 * a[0] * a[1])
    return 1 + largest * 2 * xs[0] ** 2, truth


@counterexample("emadi2026", 4, harmless=(2,))
def value_path_has_two_maps(maps: int) -> Sides:
    """(1 + β²)^N at N = 64 beside ten times that at N = 16, β = N^(−1/maps)."""
    low, high = ((isqrt(n) if maps == 4 else n) for n in (16, 64))
    return 10 * (1 + Q(1, low)) ** 16, (1 + Q(1, high)) ** 64


@counterexample("emadi2026", Q(1), harmless=(Q(1, 32),))
def asymmetric_gains(product: Q) -> Sides:
    return 10 * (1 + Q(1, 32)) ** 32, (1 + product) ** 32


@counterexample("emadi2026", Q(1, 4), harmless=(Q(3, 8),))
def deepnorm_is_not_the_quartic_path(gain: Q) -> Sides:
    """The exponent over N of N·v·w/a, with v = w = N^(−gain) and a = N^(1/4)."""
    return Q(0), 1 - 2 * gain - Q(1, 4)


@counterexample("emadi2026", Q(5145, 100), harmless=(Q(5145, 1600),))
def losses_are_sums(loss: Q) -> Sides:
    return mpmath.log(50257), loss


@counterexample("mudarisov2025", Q(1, 2), harmless=(Q(1, 10),))
def corollary_3(p: Q) -> Sides:
    """J = diag − ppᵀ of (p, 1 − p) along (1, −1): a lower bound of its norm, T = 1."""
    return Q(1, 4), 2 * p * (1 - p)


@counterexample("mudarisov2025", Q(1, 2**100), harmless=(Q(0),))
def vanishing_minimum(least: Q) -> Sides:
    """‖J‖² (Frobenius) of weights 1, ½, least, which the claim puts above ¼."""
    weights = [Q(1), Q(1, 2) if least else Q(1), least]
    p = [w / sum(weights) for w in weights]
    entries = (p[i] * ((i == j) - p[j]) for i in range(3) for j in range(3))
    return sum(e * e for e in entries), Q(1, 4)


@counterexample("mudarisov2025", (90, 9, 1), harmless=((1, 9, 90),))
def theorem_1(hundredths: Sequence[int]) -> Sides:
    """Three unit vectors, the set that holds only the last."""
    a, b, c = (mpmath.mpf(n) / 100 for n in hundredths)
    bound = (1 - c) * mpmath.sqrt(2) + 2 * c - (1 - c)
    return bound, mpmath.sqrt(c * c + a * a) + mpmath.sqrt(c * c + b * b)


@counterexample("mudarisov2025", 3, 7, harmless=(1, 2))
def random_sets(top: int, tokens: int) -> Sides:
    """(1.2 × main term)² and E[d̃]² of flat weights on unit vectors."""
    return Q(36, 25) * (1 + Q(top**2, tokens - 1)), Q(top + 1)


@counterexample("mudarisov2025", 1024, harmless=(16,))
def vanishing_distance(tokens: int) -> Sides:
    def same(n: int) -> Q:
        return Q((n - n // 2) * (n // 2 - 1), n)

    return same(16), same(tokens)


@counterexample("mudarisov2025", 5, harmless=(0,))
def corollary_2(top: int) -> Sides:
    return Q(1), Q(512 - top, 512) ** 2 * (top + 1)


@counterexample("mudarisov2025", 9999, harmless=(55,))
def vanishing_weights(odds: int) -> Sides:
    """The share of one key among 10,000 whose logit is ln(odds) above the rest."""
    return Q(1, 100), Q(odds, odds + 9999)


@counterexample("mudarisov2025", 4, 2, harmless=(1, 2))
def lemma_1(odds: int, tokens: int) -> Sides:
    """The largest weight at a range ln(odds), and the printed upper end."""
    return Q(odds, odds + tokens - 1), Q(odds, tokens)


@counterexample("mudarisov2025", 100, harmless=(1,))
def self_adjusted_spectrum(logit: int) -> Sides:
    """z·softmax(z) at two equal logits, along (1, −1)."""
    return Q(10), Q(1 + logit, 2)


@counterexample("mudarisov2025", 512, 0, harmless=(512, 1))
def eighty_percent(top: int, product: int) -> Sides:
    """Recall of flat weights on unit vectors with one inner product."""
    inside = (top - 1) * (1 + (top - 2) * product)
    outside = top + 1 + top * (top - 1) * product - 2 * top * product
    return Q(4, 5), Q(inside < outside)


@counterexample("mudarisov2025", (8, 4, 2, 1), harmless=((1, 1, 1, 1),))
def collapse_is_rewarded(weights: Sequence[int]) -> Sides:
    """Recall of the two largest of identical tokens."""
    mass = sum(weights[:2])
    distance = [abs(mass - w) for w in weights]
    near = sum(d < min(distance[2:]) for d in distance[:2])
    return Q(9, 10), Q(near, 2)


@counterexample("petrov2025", Q(1, 2), harmless=(Q(1, 32),))
def softmax_is_not_flat(p: Q) -> Sides:
    """A row of 32 keys with two of mass p, along their difference."""
    return Q(1, 32), p


@counterexample("petrov2025", 1000, harmless=(1,))
def keys_are_missing_from_the_maximum(t: int) -> Sides:
    """Tokens 1 and 0, one channel, W_V = 1, W_Q = t, W_K = 0, Target = F = (½, ½).

    ‖X‖ = 1 and ‖Target‖ < 1; of Theorem 1's entries VV is 4 and QK below 4·3/4.
    """
    moment = Q(1, 4) * t
    return 3 * max(Q(4), Q(3)), moment**2 * Q(2, 2)


@counterexample("petrov2025", 32, harmless=(1,))
def query_jacobian_does_not_shrink_with_length(tokens: int) -> Sides:
    """The check's layer; the derivative by W_Q[0, 1] alone, of two tokens."""
    scores = [60 / mpmath.sqrt(2)] * 2 + [mpmath.mpf(0)] * max(0, tokens - 2)
    a = _softmax(scores)
    slope = (a[0] + a[1]) / mpmath.sqrt(2)
    return 2 / mpmath.mpf(tokens), mpmath.sqrt(2) * slope


@counterexample("petrov2025", (0, 1, 3), harmless=((1, 1, 1),))
def uniform_attention_is_curved(tokens: Sequence[int]) -> Sides:
    mean = Q(sum(tokens), len(tokens))
    return Q(0), sum((x - mean) ** 2 for x in tokens)


@counterexample("petrov2025", -1, harmless=(0,))
def softmax_second_derivative_is_not_its_largest_block(sign: int) -> Sides:
    """Squares of both norms at a = (3 ± √3)/6: blocks are c·[[1, −1], [−1, 1]]."""
    a = (3 + sign * mpmath.sqrt(3)) / 6
    third = a * (1 - a) * (1 - 2 * a)
    block = (2 * third) ** 2
    return block, 2 * block


@counterexample("petrov2025", 1, harmless=(0,))
def taylor_needs_a_remainder(w: int) -> Sides:
    return Q(0), Q(w**4, 2)


@counterexample("petrov2025", 4, harmless=(1,))
def norm_lemma_needs_the_deviation(root: int) -> Sides:
    """A row of n = root² entries ±1: its norm is root, its deviation 1."""
    return Q(1, root) + Q(1, root**2), Q(1)


@counterexample("petrov2025", 100, harmless=(1,))
def norm_lemma_has_a_term_of_wrong_degree(c: int) -> Sides:
    """From ±1 to ±c (n = 16): ten times how the printed term falls, how ‖H‖ does."""
    middle = [Q(16 * k**2, 4 * k**3) for k in (1, c)]
    squared = [Q(14, 16) / k**4 for k in (1, c)]  # (n − 2)/n ÷ σ⁴
    return (10 * middle[0] / middle[1]) ** 2, squared[0] / squared[1]


@counterexample("petrov2025", 10, harmless=(1,))
def value_curvature_is_quadratic_in_the_input(c: int) -> Sides:
    """Ten times the growth of (mean of the tokens)², and the claimed c⁴."""
    mean = [Q(sum(k * x for x in (1, 2, 6)), 3) for k in (1, c)]
    return 10 * mean[1] ** 2 / mean[0] ** 2, Q(c**4)


@counterexample("petrov2025", 0, harmless=(1,))
def scale_derivative_lacks_a_root(roots: int) -> Sides:
    """‖∂σ/∂x‖² of a row, and of what is printed, divided by d as often as said."""
    row = (-1, 0, 1, 8)
    m = [x - Q(sum(row), 4) for x in row]
    square = sum(x * x for x in m)
    true = sum((x / 4) ** 2 / (square / 4) for x in m)
    return true, sum(x * x / square for x in m) / 4**roots


@counterexample("petrov2025", 1, harmless=(-1,))
def mixed_block_does_not_vanish_with_w2(y: int) -> Sides:
    return Q(0), Q(abs(y) * (y > 0))


@counterexample("petrov2025", 0, harmless=(10,))
def activation_of_the_experiments_bends(x: int) -> Sides:
    return Q(0), (2 - x**2) * mpmath.npdf(x)


@counterexample("petrov2025", 4096, harmless=(8,))
def gradient_sums_stall_in_bfloat16(count: int) -> Sides:
    """A sum of 41/512 (0.08 in bf16), rounded to 8 bits after every term."""
    value = total = Q(41, 512)
    for _ in range(count - 1):
        exact = total + value
        unit = Q(2) ** (exact.numerator // exact.denominator).bit_length() / 2**8
        unit = unit if exact >= 1 else Q(1, 2**11)
        total = round(exact / unit) * unit
    return 2 * total / count, value


@counterexample("baek2025", 1000, harmless=(0,))
def kappa_softmax_sees_a_common_offset(offset: int) -> Sides:
    """(100 × κ)² without the offset, and κ² with it, p and J being the same."""
    return Q(100**2), Q(offset**2 + (offset + 1) ** 2)


@counterexample("baek2025", 11, 1, harmless=(11, 0))
def two_roundoffs(bits: int, more: int) -> Sides:
    return Q(1, 2**bits), Q(2**more, 2**bits)


@counterexample("baek2025", (1, -1), harmless=((1, 1),))
def value_condition_misleads(v: Sequence[int]) -> Sides:
    """(κ(V)‖PV‖)² and (‖P‖‖V‖)² of one channel under uniform P: κ(V) = 1."""
    mean = Q(sum(v), len(v))
    return len(v) * mean**2, Q(sum(x * x for x in v))


@counterexample("baek2025", Q(-999, 1000), harmless=(Q(0),))
def residual_does_not_relax(branch: Q) -> Sides:
    return Q(1), 1 / abs(1 + branch)


@counterexample("baek2025", Q(1, 100), harmless=(Q(1, 10**5),))
def intervention_never_fires(variance: Q) -> Sides:
    """The largest σ² at which ρ_LN < 1: D = 128, fp16, ε = 1e-5."""
    return Q(1, 10**5) / (128 * Q(1, 2**10)), variance


@counterexample("baek2026", 6, harmless=(60,))
def cap_never_binds(actions: int) -> Sides:
    base, cap = Q(1, 10**5), Q(1, 100)
    eps = base
    for n in range(actions):
        room = (cap - eps) / (cap - base)
        times = 1 + 3 * (Q(1, 4) + Q(3, 4) * room) / (1 + Q(3, 5) * n)
        eps = min(cap, (eps * times).limit_denominator(10**40))
    return eps, cap


@counterexample("baek2026", Q(1, 10**4), harmless=(Q(900),))
def token_mean_variance_hides_small_tokens(small: Q) -> Sides:
    """200 tokens of this variance and 56 of 900, ε = 1e-5."""
    eps = Q(1, 10**5)
    mean = (200 * small + 56 * 900) / 256
    v, each = _mp(mean + eps), _mp(small + eps)
    return (2 * v - _mp(eps)) / v**1.5, 1 / mpmath.sqrt(each)


@counterexample("baek2026", Q(1), Q(1, 100), harmless=(Q(1), Q(1)))
def ranking_prefers_where_epsilon_acts_least(high: Q, low: Q) -> Sides:
    """½Δε/(σ² + ε) where the score is higher, and where it is lower."""
    base, reached = Q(1, 10**5), Q(173, 10**5)
    return tuple((reached - base) / (2 * (v + base)) for v in (high, low))  # type: ignore[return-value]
