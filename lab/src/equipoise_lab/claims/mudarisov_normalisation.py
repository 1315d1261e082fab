"""Mudarisov et al. (2025), §2 and §3.3: what normalisation forbids; its gradient."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from equipoise.numerics.normalisers import NORMALISERS, attention_weights, rows
from equipoise.numerics.normalisers.closed_form import ScalableSoftmax
from equipoise.numerics.selection import range_needed, weight_interval
from equipoise.theory.softmax_norms import SUPREMA, softmax_jacobian_norms
from equipoise_lab.claims.result import MUDARISOV, Found, judged

Weight = Callable[[Tensor], Tensor]

# Positive functions F of one logit; α = F(l)/ΣF(l).
FAMILIES: dict[str, Weight] = {
    "exp": torch.exp,
    "exp(l/0.1)": lambda z: torch.exp(z / 0.1),
    "softplus": torch.nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "quadratic": lambda z: 1 + z.square(),
    "elu + 1": lambda z: torch.nn.functional.elu(z) + 1,
}


@MUDARISOV.claim("Cor. 3", kind="corollary")
def corollary_3() -> Found:
    """Norms of the Jacobian at two equal logits, at three temperatures.

    Claim: The gradient of softmax(l/T) has norm at most min{1/(4T), √2}.

    Instead: 1/(4T) bounds single entries; the spectral and Frobenius norms reach
    1/(2T), rows √2/(4T). A finite step ε obeys min{1/(2T), √2/ε}: the diameter of the
    simplex has to be divided by the step.

    Practice: Softmax's sensitivity is 1/(2T), not 1/(4T).
    """
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    evidence = {}
    for T in (1.0, 0.1, 0.01):
        norms = softmax_jacobian_norms(half, temperature=T)
        evidence[f"claimed at T = {T:g}"] = min(1 / (4 * T), 2**0.5)
        evidence[f"spectral norm at T = {T:g}"] = float(norms.spectral)
        evidence[f"Frobenius norm at T = {T:g}"] = float(norms.frobenius)
        evidence[f"row length at T = {T:g}"] = float(norms.row)
        evidence[f"largest entry at T = {T:g}"] = float(norms.entry)
    evidence["measured change per unit, T = 0.01"] = _finite_difference(0.01, 1e-3)
    parts = {
        f"{norm}, T = {T:g}": evidence[f"{norm} at T = {T:g}"]
        <= evidence[f"claimed at T = {T:g}"]
        for norm in ("spectral norm", "Frobenius norm")
        for T in (1.0, 0.1, 0.01)
    }
    ours = all(
        math.isclose(evidence[f"spectral norm at T = {T:g}"], 1 / (2 * T))
        for T in (1.0, 0.1, 0.01)
    )
    return judged(parts, evidence, instead=ours)


@MUDARISOV.claim("Lemma 2, as reconstructed", kind="lemma")
def lemma_2() -> Found:
    """‖J‖ over max|h|, h = F'/F, of six F; and ‖J‖ where only min F changes.

    Claim: The gradient of α = F(l)/ΣF is governed by 1/min F.

    Instead: ‖J‖₂ ≤ ½·max|F'/F| and every entry ≤ ¼·max|F'/F|, both attained at two
    equal logits, for every positive F.
    """
    z_NK = torch.randn(
        300, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    tie_NK = z_NK[:, :1].expand(-1, 2)
    evidence = {}
    for name, F in FAMILIES.items():
        evidence[f"largest norm / max|h|, {name}"] = _ratio(F, z_NK)
        evidence[f"at two equal logits, {name}"] = _ratio(F, tie_NK)
    worst = max(evidence.values())
    moved = z_NK - 20  # exp: min F falls by e^20, and nothing else changes
    growth = float((_norms(torch.exp, moved) / _norms(torch.exp, z_NK)).max())
    evidence["growth of the norm where 1/min F grows by e^20"] = growth
    parts = {"it follows 1/min F": growth > 2}
    return judged(parts, evidence, instead=worst <= SUPREMA["spectral"] + 1e-12)


@MUDARISOV.claim("§3.3, after Lemma 2", kind="lemma")
def vanishing_minimum() -> Found:
    """‖J‖ of softmax as one logit goes to −∞, and of F = l² near its zero.

    Claim: Any normaliser whose minimum vanishes inherits the instability.

    Instead: Only max|F'/F| matters: it is 1/T for softmax however small F gets, and the
    Jacobian of F = l² stays small near its zero too.
    """
    evidence = {}
    for low in (-1.0, -10.0, -100.0):
        z_1K = torch.tensor([[1.0, 0.5, low]], dtype=torch.float64)
        evidence[f"min F at {low:g}"] = float(z_1K.exp().min())
        evidence[f"norm at {low:g}"] = float(_norms(torch.exp, z_1K))
    shrinking = torch.tensor([[0.0, 1e-6, 1.0]], dtype=torch.float64)
    evidence["norm of F = l² near 0"] = float(_norms(_square, shrinking))
    bounded = all(v <= 0.5 for k, v in evidence.items() if k.startswith("norm at"))
    return judged({"softmax's grows as min F vanishes": not bounded}, evidence)


def _square(z: Tensor) -> Tensor:
    return z.square()


def _finite_difference(T: float, step: float) -> float:
    v = torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5
    half = step * v / (2 * T)  # a step of the given length, across the tie
    before, after = torch.softmax(-half, -1), torch.softmax(half, -1)
    return float((after - before).norm() / step)


def _norms(F: Weight, z_NK: Tensor) -> Tensor:
    """Return ‖∂α/∂l‖₂ of every row, by autograd."""
    J_NKK = vmap(jacrev(lambda z_K: F(z_K) / F(z_K).sum()))(z_NK)
    norms_N: Tensor = torch.linalg.matrix_norm(J_NKK, ord=2)
    return norms_N


def _ratio(F: Weight, z_NK: Tensor) -> float:
    slope_NK = vmap(vmap(jacrev(lambda z: F(z).log())))(z_NK)
    return float((_norms(F, z_NK) / slope_NK.abs().amax(-1)).max())


@MUDARISOV.claim("§3.3, motivating example", kind="lemma")
def swapped_leaders() -> Found:
    """Logits (a+ε, a, …) and (a, a+2ε, …): √5·ε apart, their leaders exchanged.

    Claim: An exchange of the two leading logits moves the weights by O(ε/T).

    Instead: As stated, and by at most √5·ε/(2T): the sharp constant of softmax.
    """
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for T, step in itertools.product((0.01, 0.1, 1.0, 10.0), (1e-6, 1e-3, 1e-1)):
        rest = -torch.rand(64, 6, generator=rng, dtype=torch.float64)
        before = torch.cat([torch.tensor([step, 0.0]).expand(64, 2), rest], -1)
        after = torch.cat([torch.tensor([0.0, 2 * step]).expand(64, 2), rest], -1)
        moved = ((after / T).softmax(-1) - (before / T).softmax(-1)).norm(dim=-1)
        worst = max(worst, float(moved.max()) / (math.sqrt(5) * step / (2 * T)))
    numbers = {"pairs": 768.0, "largest change ÷ √5·ε/(2T)": worst}
    return judged({"at most √5·ε/(2T)": worst <= 1 + 1e-6}, numbers)


@MUDARISOV.claim("Guidelines, temperature", kind="recommendation")
def low_temperature() -> Found:
    """One row of weights written at T = 1 and at T = 0.01 with logits divided by 100.

    Claim: Avoid T ≤ 0.1: it makes the gradient of the weights large.

    Instead: T alone says nothing: weights depend on l/T, and so does their change for
    a relative change of the logits. Judge ρ = (l_max − l_min)/T.
    """
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(100, 16, generator=rng, dtype=torch.float64)
    apart, change = 0.0, {}
    for T in (1.0, 0.01):
        logits = z * T
        apart = max(
            apart, float(((logits / T).softmax(-1) - z.softmax(-1)).abs().max())
        )
        push = 1e-6 * logits
        moved = ((logits + push) / T).softmax(-1) - (logits / T).softmax(-1)
        change[T] = float(moved.norm(dim=-1).max()) / 1e-6
    same = apart < 1e-12 and abs(change[1.0] / change[0.01] - 1) < 1e-3
    numbers = {
        "largest difference of the weights at one l/T": apart,
        "change per relative change of logits, T = 1": change[1.0],
        "the same at T = 0.01, one l/T": change[0.01],
    }
    parts = {"a low T alone makes it larger": change[0.01] > 1.1 * change[1.0]}
    return judged(parts, numbers, instead=same)


@MUDARISOV.claim("Guidelines, number of heads", kind="recommendation")
def independent_heads() -> Found:
    """Three heads that each keep 80 %: drawn independently, and all alike.

    Claim: H heads that each separate a share p together cover 1 − (1−p)^H.

    Instead: Only if heads fail independently; heads that fail on the same tokens cover
    p, however many. Measure the coverage of the heads you have.
    """
    rng = torch.Generator().manual_seed(0)
    p, heads, tokens = 0.8, 3, 200_000
    drawn = torch.rand(heads, tokens, generator=rng, dtype=torch.float64) < p
    claimed = 1 - (1 - p) ** heads
    apart = float(drawn.any(0).double().mean())
    alike = float(drawn[:1].expand(heads, -1).any(0).double().mean())
    noise = 4 * math.sqrt(claimed * (1 - claimed) / tokens)
    numbers = {
        "claimed": claimed,
        "independent heads": apart,
        "four standard errors": noise,
        "heads that fail alike": alike,
    }
    parts = {"independent heads": abs(apart - claimed) <= noise}
    return judged(parts, numbers, caveat=alike < claimed - 0.1)


@MUDARISOV.claim("Algorithm 5", kind="heuristic")
def random_directions_understate() -> Found:
    """g along a random unit direction, and the spectral norm it is compared with.

    Claim: Algorithm 5's random directions show how sensitive attention is.

    Instead: They show ‖J‖_F/√L on average, L the number of keys: a search finds the
    spectral norm, several times larger. Both obey min{1/(2T), √2/ε}.
    """
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(64, 256, generator=rng, dtype=torch.float64)
    T, step = 0.1, 1e-3
    v = torch.nn.functional.normalize(
        torch.randn(64, 256, generator=rng, dtype=torch.float64), dim=-1
    )
    g = (((z + step * v) / T).softmax(-1) - (z / T).softmax(-1)).norm(dim=-1) / step
    norms = softmax_jacobian_norms((z / T).softmax(-1), temperature=T)
    typical = norms.frobenius / math.sqrt(256)
    within = bool((g <= min(1 / (2 * T), math.sqrt(2) / step)).all())
    gap = float(norms.spectral.median() / g.median())
    average = float(g.square().mean() / typical.square().mean())
    numbers = {
        "median g": float(g.median()),
        "median ‖J‖_F/√L": float(typical.median()),
        "mean g² ÷ mean ‖J‖_F²/L": average,
        "median spectral norm": float(norms.spectral.median()),
    }
    parts = {"within a factor of 3 of the norm": gap < 3}
    ours = within and 0.5 < average < 2
    return judged(parts, numbers, instead=ours)


LENGTHS = (10, 100, 1000, 10_000)


@MUDARISOV.claim("Lemma 1, Corollary 1", kind="corollary")
def lemma_1() -> Found:
    """The printed ends beside the largest and the least weight that a range allows.

    Claim: e^{−2Δ/T}/L ≤ α_i ≤ e^{2Δ/T}/L, Δ = ‖q‖‖k‖ (k the longest key).

    Rule: It holds if no weight lies outside; with a caveat if the printed upper end
    exceeds 1, which no weight does.

    Instead: True where Δ takes the longest key, and wide: 1/(1+(L−1)e^ρ) ≤ α_i ≤
    1/(1+(L−1)e^{−ρ}), ρ = (l_max−l_min)/T, both ends attained.

    Practice: With logits within a range ρ no key of L gets more than
    1/(1+(L−1)e^{−ρ}).
    """
    evidence: dict[str, float] = {}
    true, attained, loose = True, True, False
    for rho, n in itertools.product((1.0, 4.0), (10, 1000)):
        ends = weight_interval(torch.tensor(rho).double(), torch.tensor(float(n)))
        lower, upper = ends.lower.item(), ends.upper.item()
        least, most = _alone(-rho, n), _alone(rho, n)
        low, high = math.exp(-rho) / n, math.exp(rho) / n
        case = f"ρ = {rho:g}, n = {n}"
        evidence |= {
            f"printed upper, {case}": high,
            f"attained, {case}": most,
            f"tight upper, {case}": upper,
            f"attained from below, {case}": least,
            f"tight lower, {case}": lower,
        }
        true &= low <= least and most <= high
        attained &= math.isclose(least, lower) and math.isclose(most, upper)
        loose |= high > 1
    evidence["the tight ends are attained"] = float(attained)
    return judged({"no weight lies outside": true}, evidence, caveat=loose)


@MUDARISOV.claim("Lemma 1, discussion", kind="lemma")
def vanishing_weights() -> Found:
    """The largest weight over L, at a fixed range of logits and at one that grows.

    Claim: With logits in a fixed range, a normaliser that divides by a sum cannot
    select in a long context.

    Rule: It holds if the largest share a fixed range allows falls by ten from 100 to
    10000 keys; with a caveat if a range that grows like ln L keeps it at ½.

    Instead: True, and the hypothesis matters: one key keeps a share c as long as ρ
    ≥ ln((L−1)c/(1−c)); scalable softmax keeps its winner where s·gap > 1.

    Practice: A head can select in any context if its range of logits grows like ln
    L.
    """
    evidence = {}
    for n in LENGTHS:
        evidence[f"range fixed at 4, n = {n}"] = _alone(4.0, n)
        evidence[f"range ln(n−1), n = {n}"] = _alone(range_needed(n, 0.5), n)
        for s in (0.4, 0.6):
            evidence[f"ssmax s = {s:g}, gap 2, n = {n}"] = _winner(s, n)
    kept = evidence["range ln(n−1), n = 10000"] > 0.499
    ends = (evidence[f"range fixed at 4, n = {n}"] for n in (100, 10000))
    falls = next(ends) > 10 * next(ends)
    return judged({"at a fixed range": falls}, evidence, caveat=kept)


@MUDARISOV.claim("§5, on self-adjusted softmax", kind="definition")
def self_adjusted_spectrum() -> Found:
    """‖J‖₂ of self-adjusted softmax, plain and normalised, and of our safe form.

    Claim: It keeps the spectrum of the Jacobian in a healthy band.

    Instead: z·softmax(z) has ‖J‖₂ = (1+c)/2 at two logits c; the normalised form grows
    like 1/R as the range R shrinks. Adding η = 1 above and below bounds it by ½ +
    (1+√2)/η.
    """
    evidence = {}
    for c in (1.0, 10.0, 100.0):
        z = torch.full((1, 2), c, dtype=torch.float64)
        J = NORMALISERS["self-adjusted"]().jacobian(rows(z)).dense()[0]
        evidence[f"plain, two logits of {c:g}"] = _norm(J)
    for span in (1.0, 0.1, 0.01, 0.001):
        z_K = span * torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64)
        evidence[f"normalised, span {span:g}"] = _norm(jacrev(_normalised)(z_K))
        safe = NORMALISERS["self-adjusted-safe"]().jacobian(rows(z_K)).dense()
        evidence[f"our safe form, span {span:g}"] = _norm(safe)
    parts = {
        "plain": evidence["plain, two logits of 100"] < 2,
        "normalised": evidence["normalised, span 0.001"] < 100,
    }
    ours = (v for k, v in evidence.items() if k.startswith("our safe form"))
    return judged(parts, evidence, instead=max(ours) <= 0.5 + 1 + math.sqrt(2))


def _normalised(z_K: Tensor) -> Tensor:
    low, high = z_K.min().clamp(max=0.0), z_K.max().clamp(min=0.0)
    return (z_K - low) / (high - low) * z_K.softmax(-1)


def _norm(J_KK: Tensor) -> float:
    return float(torch.linalg.matrix_norm(J_KK, ord=2))


def _alone(rho: float, n: int) -> float:
    """Return the weight of one logit ρ above n − 1 equal ones."""
    z = torch.zeros(n, dtype=torch.float64)
    z[0] = rho
    return float(z.softmax(-1)[0])


def _winner(s: float, n: int) -> float:
    z = torch.zeros(1, n, dtype=torch.float64)
    z[0, 0] = 2.0
    return float(attention_weights(ScalableSoftmax(s), z)[0, 0])
