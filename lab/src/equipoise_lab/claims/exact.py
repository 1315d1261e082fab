"""Counterexamples once more, in rationals or with 50 digits: rounding refutes nothing.

Each function returns the two sides of what a claim asserts, ``(at most this, this)``,
at a point. ``Claim.run`` calls it at the counterexample: the second side must exceed
the first, or the refutation does not stand. ``harmless`` is a point at which the claim
is right. Floats of a check's counterexample are rationals as they are; where a smaller
point shows the same, it is used instead. Names are those of the checks.

``exact_petrov_baek`` holds those of Petrov and Baek. ``NOT_ALGEBRAIC`` says of every
other claim that is refuted or corrected why there is nothing to evaluate.
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
                mp(s) if isinstance(s, Q) else s
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


NOT_ALGEBRAIC = {
    "mudarisov2025.critical_fraction": "where a test on samples of heads stops "
    "rejecting: a statistic of draws",
    "petrov2025.block_bound_is_exceeded": "spectral norms of matrices of 1,088 rows, "
    "ten times apart, which have no closed form; computed in float64",
    "baek2025.prediction_is_vacuous": "compares with the rounding error measured on a "
    "network",
    "baek2025.gain_is_not_small": "norms of random weights as PyTorch draws them",
    "baek2025.zeros_hide_failures": "what code does with NaN and infinity, which are "
    "not numbers",
    "baek2025.independent_curves_pass": "p-values of random series",
    "baek2025.collapse_is_the_format": "correlations of random samples",
}
"""Claim → why its refutation is not computed again without rounding."""
BY_HAND = "computed again in rationals or with 50 digits"


def confirmation(claim: str) -> str:
    """Return how a claim's counterexample is confirmed, or why it is not."""
    return BY_HAND if claim in COUNTEREXAMPLES else NOT_ALGEBRAIC.get(claim, "")


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


def mp(value: Number) -> Number:
    return mpmath.mpf(value.numerator) / value.denominator


def softmax(scores: Sequence[Number]) -> list[Number]:
    weights = [mpmath.exp(s) for s in scores]
    return [w / sum(weights) for w in weights]


@counterexample("emadi2026", 10, harmless=(2,))
def peaked_bound(keys: int) -> Sides:
    kappa = 1 - Q(1, keys)
    return 4 * kappa * (1 - kappa), theta([Q(1, keys)] * keys)


@counterexample("emadi2026", Q(1, 10**4), 5, harmless=(Q(1, 2), 5))
def finite_steps_of_saturated_rows(small: Number, radius: int) -> Sides:
    """A row (1 − s, s): θ·r, and its change by +r on the small key, −r off it."""
    m, up, down = mp(small), mpmath.exp(radius), mpmath.exp(-radius)
    moved = 2 * (m * up / (m * up + (1 - m) * down) - m)
    return mp(theta([1 - small, small])) * radius, moved


@counterexample("emadi2026", (4, 4, 1, 1), harmless=((5, 5),))
def peaked_bound_is_tight_below_half(tenths: Sequence[int]) -> Sides:
    """4κ(1 − κ), said to be attained, beside θ of a row with a part of ½."""
    row = [Q(n, 10) for n in tenths]
    kappa = 1 - max(row)
    return 4 * kappa * (1 - kappa), theta(row)


@counterexample("emadi2026", Q(-1), harmless=(Q(0),))
def identity_can_be_cancelled(gain: Q) -> Sides:
    """Ten times ‖(I + gain·J_LN)v‖² beside ‖v‖², at x = (1, −1, 1, −1), σ = 1."""
    x, v = (Q(1), Q(-1), Q(1), Q(-1)), (Q(1), Q(1), Q(-1), Q(-1))
    along = sum(a * b for a, b in zip(x, v, strict=True)) / 4
    mean = sum(v) / 4
    moved = [a + gain * (a - mean - b * along) for a, b in zip(v, x, strict=True)]
    return 100 * sum(a * a for a in moved), sum(a * a for a in v)


@counterexample("emadi2026", 3, harmless=(Q(1, 2),))
def tightness_step_fails(S: Number) -> Sides:
    """exp(NS − NS²/2) at N = 100 is at least that at N = 10."""
    small, large = (mpmath.exp(mp(Q(N) * S - Q(N) * S * S / 2)) for N in (10, 100))
    return large, small


@counterexample("emadi2026", 2, harmless=(1,))
def path_counts(beta: int) -> Sides:
    """One channel, W_Q = W_K = W_V = W_O = β: (x W_Q)(x W_K)·x W_V W_O at x = 1."""
    w = Q(beta)
    return w**3, (w * w) * (w * w)


def _prefix_and_theta(tenths: Sequence[int]) -> Sides:
    row = [Q(n, 10) for n in tenths]
    return _prefix(row), theta(row)


@counterexample("emadi2026", (3, 3, 2, 2), harmless=((6, 2, 1, 1),))
def greedy_prefix(tenths: Sequence[int]) -> Sides:
    return _prefix_and_theta(tenths)


@counterexample("emadi2026", 1, harmless=(2,))
def one_throughout(visible: int) -> Sides:
    return theta([Q(1, visible)] * visible), Q(1)


@counterexample("emadi2026", Q(7, 5), Q(143, 100), harmless=(Q(0), Q(1)))
def activation_constant(x: Q, y: Q) -> Sides:
    def gelu(z: Q) -> Number:
        return mp(z) * mpmath.ncdf(mp(z))

    return y - x, gelu(y) - gelu(x)


@counterexample("emadi2026", 200, harmless=(1,))
def measured_theta_is_local(sharpness: int) -> Sides:
    """One head of width one on (t, 1, −1) and (−t, 1, −1), t = 0.1."""
    t = mpmath.mpf(1) / 10
    rows = [softmax([sharpness * i * j for j in (t, 1, -1)]) for i in (t, 1, -1)]
    largest = max(4 * max(s * (1 - s) for s in (*row, row[0] + row[1])) for row in rows)
    other = softmax([sharpness * -t * j for j in (-t, 1, -1)])
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
        a = softmax([(x + bias) * y for y in xs])
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


@counterexample("mudarisov2025", Q(5, 1024), harmless=(Q(1, 2),))
def linear_expectation(share: Q) -> Sides:
    """E[d̃] of flat weights on identical tokens, L = 1024: half of 16 × that at 64.

    N is 5 at both lengths, or half of each: every set of N has the same d̃.
    """

    def expected(tokens: int) -> Q:
        top = 5 if share < Q(1, 2) else tokens // 2
        return Q((tokens - top) * (top - 1), tokens)

    return expected(1024), 8 * expected(64)


@counterexample("mudarisov2025", 1, harmless=(0,))
def lemma_2(more: int) -> Sides:
    """∂α/∂l of two keys with F = e^l: weights (1, m, …), and ten times (1, m) alone.

    The least F is the same, 2^−100; in the first there is another key of weight 1.
    """
    least = Q(1, 2**100)
    few, many = [Q(1), least], [Q(1)] * more + [Q(1), least]
    slopes = [w[0] / sum(w) * (1 - w[0] / sum(w)) for w in (few, many)]
    return 10 * slopes[0], slopes[1]


@counterexample("mudarisov2025", 1, harmless=(0,))
def low_temperature(gap: int) -> Sides:
    """‖∂α/∂l‖ of two logits this far apart: at T = 0.01, and at T = 1."""

    def norm(T: Q) -> Number:
        p, q = softmax([mp(gap / T), 0])
        return 2 * p * q / mp(T)

    return norm(Q(1, 100)), norm(Q(1))


@counterexample("mudarisov2025", 256, harmless=(2,))
def random_directions_understate(keys: int) -> Sides:
    """Nine times the mean square along a random direction, and ‖J‖², of (½, ½, 0, …).

    J is ¼·[[1, −1], [−1, 1]] there: ‖J‖_F² = ‖J‖² = ¼.
    """
    return 9 * Q(1, 4) / keys, Q(1, 4)


@counterexample("mudarisov2025", Q(1, 2), harmless=(Q(1, 5),))
def theorem_2(radius: Q) -> Sides:
    """Two tokens of weight 1/5 on the unit sphere: X = 1/5 always, and ξ = 1/5."""
    weight = Q(1, 5)
    recall = Q(weight <= radius)
    return mpmath.exp(-(mp(weight - radius) ** 2) / 2), recall


@counterexample("mudarisov2025", False, harmless=(True,))
def closed_ball(strict: bool) -> Sides:
    """How many of the rest are in the ball of the first two: equal tokens, 4 3 2 1."""
    distance = [abs(7 - w) for w in (4, 3, 2, 1)]
    radius = min(distance[2:])
    return Q(0), Q(
        sum(d < radius or (d == radius and not strict) for d in distance[2:])
    )


@counterexample("mudarisov2025", (1, 1, -1, -1), harmless=((1, 1, 1, 1),))
def functional_relevance(values: Sequence[int]) -> Sides:
    """The error of keeping two of four tokens (weights 3 3 2 2), renormalised.

    First of (1, −1, 1, −1), whose recall is 0 and error 0; then of these, recall 1.
    """

    def head(of: Sequence[int]) -> tuple[int, Q]:
        y = [w * x for w, x in zip((3, 3, 2, 2), of, strict=True)]
        s = y[0] + y[1]
        near = min(abs(s - v) for v in y[2:])
        return sum(abs(s - v) < near for v in y[:2]), abs(Q(sum(y), 10) - Q(s, 6))

    (low, least), (high, error) = head((1, -1, 1, -1)), head(values)
    assert (low, high) == (0, 2)
    return least, error
