"""Emadi (2026), §7 and Apps. B, E.1–E.3: rows near one-hot, exhaustive search, numbers.

Axes, in this file:  N row · K key · S sign vector or subset.
"""

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from equipoise.numerics.rows.balance import balance
from equipoise_lab.claims.emadi import peaked_rows
from equipoise_lab.claims.exact import theta
from equipoise_lab.claims.result import EMADI, Found, judged

ROUNDING = 1e-12


@EMADI.claim("App. B, case 3: when the bound is tight", kind="corollary")
def peaked_bound_is_tight_below_half() -> Found:
    """θ over 4κ(1 − κ), for κ < ½ and for κ > ½ with a rest that splits to ½.

    Claim: 4κ(1 − κ) is tight where part of the rest sums to ½, which needs κ ≥ ½; below
    ½ it may not be achieved.

    Rule: Two parts: at κ > ½ a row with such a part attains it (its θ is 1 there);
    below ½ some row falls short of it. What stands in its place: for κ ≤ ½ every row
    attains it.

    Instead: The other way round: every row with κ ≤ ½ attains it, by S = {top}; with κ
    > ½ and a part of ½, θ = 1 exceeds it.
    """
    peaked = peaked_rows()
    top = peaked.amax(-1)
    below = balance(peaked).lower / (4 * top * (1 - top))
    split = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float64)
    above = float(balance(split).lower) / (4 * 0.4 * 0.6)
    numbers = {
        "least θ ÷ bound, 200 rows with κ < ½": float(below.min()),
        "largest": float(below.max()),
        "θ ÷ bound at (.4, .1, .4, .1), κ = .6": above,
    }
    parts = {
        "tight where the rest splits to ½": abs(above - 1) < ROUNDING,
        "may fall short below ½": float(below.min()) < 1 - ROUNDING,
    }
    attained = float((below - 1).abs().max()) < ROUNDING
    return judged(parts, numbers, instead=attained)


@EMADI.claim("§7, what drives θ to 0", kind="lemma")
def only_near_one_hot_rows_are_insensitive() -> Found:
    """The least θ of rows without a key above ½: every row of fractions, and descent.

    Claim: Only near-one-hot attention (one token dominating) drives θ towards 0.

    Rule: It holds if θ stays away from 0 where no key has more than ½ of the mass; the
    least is found exactly, over every row whose weights are multiples of 1/n, n ≤ 12.

    Instead: As stated, and sharply: where no key has more than ½, θ ≥ 8/9, which three
    equal keys attain; so θ < 8/9 says that one key has p > ½, and θ = 4p(1 − p).

    Practice: θ below 8/9 means one key with more than half of the mass; its weight p is
    then the whole story, θ = 4p(1 − p).
    """
    least, count = Fraction(1), 0
    for n in range(2, 13):
        for parts_n in _partitions(n, n // 2):
            least = min(least, theta([Fraction(part, n) for part in parts_n]))
            count += 1
    drawn = _without_a_majority()
    numbers = {
        "rows of fractions": float(count),
        "their least θ": float(least),
        "8/9": 8 / 9,
        "least θ of 3000 random rows": float(balance(drawn).lower.min()),
    }
    bounded = least == Fraction(8, 9) and float(balance(drawn).lower.min()) >= 8 / 9
    return judged({"θ ≥ 8/9 where no key has more than ½": bounded}, numbers)


def _partitions(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as a sum of parts of at most ``most``, largest first.

    >>> list(_partitions(4, 2))
    [(2, 2), (2, 1, 1), (1, 1, 1, 1)]
    """
    if n == 0:
        yield ()
    for part in range(min(n, most), 0, -1):
        for rest in _partitions(n - part, part):
            yield (part, *rest)


def _without_a_majority() -> Tensor:
    """Return rows of 3 to 8 keys whose largest weight is at most ½."""
    rng = torch.Generator().manual_seed(0)
    z_NK = 2 * torch.randn(3000, 8, generator=rng, dtype=torch.float64)
    hidden = torch.arange(8) >= torch.randint(3, 9, (3000, 1), generator=rng)
    p_NK = z_NK.masked_fill(hidden, -math.inf).softmax(-1)
    top, at = p_NK.max(-1, keepdim=True)
    rest = p_NK.scatter(-1, at, 0.0)
    halved = 0.5 * rest / rest.sum(-1, keepdim=True)
    halved.scatter_(-1, at, 0.5)
    return torch.where(top > 0.5, halved, p_NK)


@EMADI.claim("App. E.2, exhaustive search", kind="experiment")
def exhaustive_search_agrees() -> Found:
    """‖Jx‖₁ over all sign vectors beside 4p(S)(1 − p(S)) over all subsets, in float64.

    Claim: For N(0, I) scores at τ = 1 and L = 8 and 16, ‖J‖ by all sign vectors and θ
    by all subsets agree to a relative 1e-13.

    Rule: One part for each length: the largest relative difference is below 1e-13 (500
    rows of 8 keys as in the paper, 40 of 16).

    Instead: As stated. It tests the code, and the theorem needs no test.
    """
    rng = torch.Generator().manual_seed(0)
    worst = {}
    for keys, rows in ((8, 500), (16, 40)):
        p_NK = torch.randn(rows, keys, generator=rng, dtype=torch.float64).softmax(-1)
        worst[keys] = max(_difference(p_K) for p_K in p_NK)
    parts = {f"L = {keys}": off < 1e-13 for keys, off in worst.items()}
    numbers = {f"largest relative difference, L = {k}": w for k, w in worst.items()}
    return judged(parts, numbers)


def _difference(p_K: Tensor) -> float:
    """Return |‖J‖ − θ|/θ, both by brute force; x and −x give the same."""
    K = len(p_K)
    chosen_SK = ((torch.arange(2 ** (K - 1))[:, None] >> torch.arange(K)) & 1).double()
    J = torch.diag(p_K) - torch.outer(p_K, p_K)
    norm = ((2 * chosen_SK - 1) @ J).abs().sum(-1).max()
    mass_S = chosen_SK @ p_K
    return float((norm / (4 * mass_S * (1 - mass_S)).max() - 1).abs())


@EMADI.claim("App. E.1, 774M", kind="definition")
def parameters_add_up() -> Found:
    """Parameters of the described model, with GPT-2's vocabulary and tied embeddings.

    Claim: d = 1280, N = 36, H = 20, d_h = 64, d_ff = 5120 and L = 1024 make 774M
    parameters; the batch of 64 is 4 × 16.

    Rule: Three parts: the sum rounds to 774 million; H·d_h = d; 4 × 16 = 64.

    Instead: As stated: 774,030,080, GPT-2 large, with 50,257 words and tied embeddings,
    which the paper does not say.
    """
    d, layers, hidden, context, words = 1280, 36, 5120, 1024, 50257
    block = 4 * d * d + 2 * d * hidden + (4 * d + hidden + d) + 4 * d
    total = words * d + context * d + layers * block + 2 * d
    parts = {
        "774 million": round(total / 1e6) == 774,
        "H·d_h = d": 20 * 64 == d,
        "4 × 16 = 64": 4 * 16 == 64,
    }
    return judged(parts, {"parameters": float(total), "of one block": float(block)})


@EMADI.claim("App. E.3, 16 % lower", kind="experiment")
def sixteen_percent_lower() -> Found:
    """1 − pre ÷ post of the printed losses, in the table and in the text.

    Claim: Pre-LN ends 16 % lower than post-LN.

    Rule: It holds if Table 1's numbers give it; with a caveat if §7's do not.

    Instead: It is 15.9 % by Table 1 and 15.0 % by §7's 51.5 and 60.6. A share of a
    cross-entropy depends on the vocabulary: quote the difference.
    """
    table, text = 1 - 51.45 / 61.15, 1 - 51.5 / 60.6
    numbers = {"by Table 1": table, "by §7": text}
    caveat = round(100 * text) != 16
    return judged({"by Table 1": round(100 * table) == 16}, numbers, caveat=caveat)
