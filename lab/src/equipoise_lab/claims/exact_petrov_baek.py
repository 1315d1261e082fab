"""Counterexamples to Petrov and Baek, in rationals or with 50 digits.

As in ``exact``: the two sides of a claim at a point, under the check's name.
"""

import itertools
from collections.abc import Sequence
from fractions import Fraction as Q

import mpmath

from equipoise_lab.claims.exact import Number, Sides, counterexample, mp, softmax


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
    a = softmax(scores)
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
    v, each = mp(mean + eps), mp(small + eps)
    return (2 * v - mp(eps)) / v**1.5, 1 / mpmath.sqrt(each)


@counterexample("baek2026", Q(1), Q(1, 100), harmless=(Q(1), Q(1)))
def ranking_prefers_where_epsilon_acts_least(high: Q, low: Q) -> Sides:
    """½Δε/(σ² + ε) where the score is higher, and where it is lower."""
    base, reached = Q(1, 10**5), Q(173, 10**5)
    return tuple((reached - base) / (2 * (v + base)) for v in (high, low))  # type: ignore[return-value]


@counterexample("petrov2025", Q(1), harmless=(Q(1, 10),))
def which_block_is_largest_depends_on_the_input(scale: Q) -> Sides:
    """VV and QQ over 2/L: tokens scale·(1, 2, 6), one channel, W_Q = 0, W_K = W_V = 1.

    At zero loss: VV is the mean squared, QQ the mean of (x·variance)².
    """
    tokens = [scale * x for x in (1, 2, 6)]
    mean = sum(tokens) / 3
    variance = sum((x - mean) ** 2 for x in tokens) / 3
    return mean**2, sum((x * variance) ** 2 for x in tokens) / 3


@counterexample("petrov2025", 3, harmless=(2,))
def blocks_are_not_each_others_equals(hidden: int) -> Sides:
    """By how many rows they differ: W_1 of 2 × hidden, W_Q of 2 × 2, two tokens."""
    return Q(0), abs(Q(4 * 2 * hidden - 4 * 2 * 2))


@counterexample("petrov2025", 1, harmless=(Q(1, 2),))
def slope_of_running_means(power: Number) -> Sides:
    """How far from −1 the slope of RMS differences is from k = 1000 to 100,000.

    Of running means of independent numbers it is (k(k+1))^−½; 0.05 would tell it apart.
    """
    size = [mpmath.log(k * (k + 1)) * mp(Q(power)) / -2 for k in (10**3, 10**5)]
    return abs((size[1] - size[0]) / mpmath.log(100) + 1), mpmath.mpf(1) / 20


@counterexample("petrov2025", True, harmless=(False,))
def mixed_blocks_are_exchanged(first_by_w1: bool) -> Sides:
    """Entries in which the print differs: one token (1, 2), two hidden units, on.

    S_c has ∂²/∂W_1[d,k]∂W_2[k',c'] = y_d·[k = k']·[c = c']. What is printed has a row
    for (c, k', c') and a column for (d, k).
    """
    y, at = (1, 2), list(itertools.product((0, 1), repeat=5))

    def by_w2_then_w1(c: int, k: int, c2: int, d: int, j: int) -> int:
        return y[d] * (k == j) * (c == c2)

    def by_w1_then_w2(c: int, d: int, k: int, j: int, c2: int) -> int:
        return y[d] * (k == j) * (c == c2)

    true = by_w1_then_w2 if first_by_w1 else by_w2_then_w1
    return Q(0), Q(sum(true(*i) != by_w2_then_w1(*i) for i in at))


@counterexample("petrov2025", Q(34), harmless=(Q(1, 4),))
def constants_disagree(width: Q) -> Sides:
    """The Value–Query entry of the appendix as 1, and of the main text: 2√d_V."""
    return Q(1), 2 * mpmath.sqrt(mp(width))


@counterexample("baek2025", Q(1, 10), harmless=(Q(2, 5),))
def power_iterations_read_low(side: Q) -> Sides:
    """J of (a, 1 − 2a, a): what iterations from a ramp give, and 0.9 of its norm.

    The ramp (−1, 0, 1) is an eigenvector of value a; the other value is 3a(1 − 2a).
    """
    p = [side, 1 - 2 * side, side]
    ramp = [Q(-1), Q(0), Q(1)]
    for _ in range(2):
        mean = sum(a * v for a, v in zip(p, ramp, strict=True))
        ramp = [a * (v - mean) for a, v in zip(p, ramp, strict=True)]
    estimate = ramp[2] / side  # after the second step, of a vector of length a
    return estimate, Q(9, 10) * max(side, 3 * side * (1 - 2 * side))


@counterexample("baek2025", 8, harmless=(1,))
def not_unitless(c: int) -> Sides:
    """‖W_O‖ (κ(V) is the same) of V·c and W_O/c, and of V and W_O: one output."""
    values, weight = (3, 5), Q(7)
    assert [v * c * (weight / c) for v in values] == [v * weight for v in values]
    return weight / c, weight


@counterexample("baek2025", Q(3), harmless=(Q(1, 10),))
def row_maximum_is_no_bound(size: Q) -> Sides:
    """Queries g(1, 1) and g(1, −1), keys ±g(1, −1): the first has scores 0, κ = 0.

    κ_score is 1. Rounding may move the first query by u·g·(1, −1): its weights move by
    u·g², to first order, and ‖P‖² ≤ 3/2.
    """
    g = mp(size)
    p, q = softmax([2 * g * g / mpmath.sqrt(2), -2 * g * g / mpmath.sqrt(2)])
    row = 2 * p * q * 2 * g * g / mpmath.sqrt(p * p + q * q)
    return 2 * row, g * g / mpmath.sqrt(mpmath.mpf(3) / 2)


@counterexample("baek2025", Q(1), harmless=(Q(1, 10**12),))
def epsilon_does_not_set_the_error(variance: Q) -> Sides:
    """From ε = 1e-2 to 1e-6: ten times how the norm's gain grows, and how C_LN does."""
    v, ends = mp(variance), [mp(Q(1, 10**n)) for n in (2, 6)]
    gain = [1 / mpmath.sqrt(v + e) for e in ends]
    printed = [mpmath.sqrt(v / e) + v / e + 1 for e in ends]
    return 10 * gain[1] / gain[0], printed[1] / printed[0]


@counterexample("baek2025", 11, harmless=(53,))
def tf32_reference_understates(bits: int) -> Sides:
    """1 + 2^−12 in fp16 against a reference of so many bits, and against itself."""
    x = 1 + Q(1, 2**12)

    def stored(kept: int) -> Q:
        return Q(round(x * 2 ** (kept - 1)), 2 ** (kept - 1))

    return abs(stored(11) - stored(bits)), abs(stored(11) - x)


@counterexample("baek2026", 1, harmless=(2,))
def score_term_is_a_product(times: int) -> Sides:
    """How far χ_score is from κ_softmax·κ_score; a hundredth would make it new."""
    q, keys = (1, 2), ((1, 0), (3, 1))
    s = [sum(a * b for a, b in zip(q, k, strict=True)) / mpmath.sqrt(2) for k in keys]
    p = softmax(s)
    size_q, size_k = mpmath.sqrt(5), mpmath.sqrt(11)
    norm_s, norm_p, slope = mpmath.norm(s), mpmath.norm(p), 2 * p[0] * p[1]
    chi = times * size_q * size_k / (mpmath.sqrt(2) * norm_p) * slope
    product = (norm_s / norm_p * slope) * (size_q * size_k / (mpmath.sqrt(2) * norm_s))
    return abs(chi / product - 1), mpmath.mpf(1) / 100


@counterexample("baek2026", 0, harmless=(5,))
def norm_ratio_is_no_transport(slope: int) -> Sides:
    """f(x) = 5 + slope·(x − 1) at x = 1: its derivative, and ‖f‖/‖x‖."""
    return Q(slope), Q(5)


@counterexample("baek2026", 256, harmless=(1,))
def risk_is_not_unitless(c: int) -> Sides:
    """Twice the risk at 1 and the risk at c: one token c(1, −1), W_O = W_proj = c·I.

    ε = 0, W_V = W_fc = I: every norm writes (1, −1), whatever c is.
    """

    def risk(scale: int) -> Number:
        root = mpmath.sqrt(2)
        norms = 2 * (2 / mpmath.mpf(scale)) * (scale * root)
        return (norms + scale * root + root + scale) / root

    return 2 * risk(1), risk(c)


@counterexample("petrov2025", (99, 100, 101), harmless=((1, -1),))
def deviation_is_not_a_singular_value(row: Sequence[int]) -> Sides:
    """One row: 1/σ + ‖x‖²/(√n σ³) with σ = ‖x‖, its singular value; and 1/deviation."""
    size, n = sum(x * x for x in row), len(row)
    variance = Q(size, n) - Q(sum(row), n) ** 2
    singular, root = mpmath.sqrt(size), mpmath.sqrt(n)
    return (1 + 1 / root) / singular, 1 / mpmath.sqrt(mp(variance))


@counterexample("baek2025", Q(1, 2**20), harmless=(Q(1),))
def weight_condition_misleads(least: Q) -> Sides:
    """Ten times ‖W‖‖x‖/‖xW‖ for W = diag(1, least), x = (1, 0); and κ(W)."""
    return Q(10), 1 / least


@counterexample("baek2025", 4, harmless=(60,))
def four_points_have_no_small_p(points: int) -> Sides:
    """p of r = 0.95 by the normal law, and the least by exchange of n points."""
    r = mpmath.mpf(19) / 20
    return mpmath.erfc(r / mpmath.sqrt(1 - r * r)), 1 / mpmath.factorial(points)
