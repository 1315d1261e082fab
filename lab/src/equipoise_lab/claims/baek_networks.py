"""Baek (v1, 2025; v2, 2026) on whole networks: risk, layer ranking, early warning."""

import itertools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.stats import spearmanr
from torch import Tensor

from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.auditing.precision.prediction import predicted
from equipoise.numerics.formats import FORMATS
from equipoise.remedies.epsilon import Epsilon, epsilons
from equipoise.theory.baek_v1 import kappa_value
from equipoise.theory.baek_v2 import BlockV2, bgss_scores
from equipoise_lab.claims.result import BAEK_V1, BAEK_V2, Found, judged
from equipoise_lab.models import GPT, GPTConfig
from equipoise_lab.results.lead_lag import lead, precision_at_k, published_lead
from equipoise_lab.studies.fragility.published import published_blocks

HALF = FORMATS["fp16"]
SCALES = (1.0, 2.0, 16.0, 256.0)
LAYERS, PUBLISHED_RANK = 12, 0.362
DRIFT = 6.0
"""Noise on top of an error that grows by 1 a layer."""


@BAEK_V2.claim("risk", kind="definition")
def risk_is_not_unitless() -> Found:
    """Embeddings, W_O and W_proj times c = 2ᵏ, ε times c²: the same network to the bit.

    The stream grows by c and every norm divides it out again.

    Claim: The scaled risk is comparable across layers and networks.

    Instead: The attention term leaves out W_O, the LN term the branch's gain, and the
    divisor is the norm behind ln_f: carry residuals to the output instead.
    """
    evidence = {}
    for c in SCALES:
        model, ids = _scaled_copy(c)
        storage = Storage.named("fp16")
        paper = published_blocks(model, ids)
        evidence[f"measured error, c = {c:g}"] = Bench(model, ids).mismatch(storage)
        evidence[f"v2 risk, c = {c:g}"] = paper.v2_prediction(HALF)
        evidence[f"ours, c = {c:g}"] = predicted(model, ids, storage=storage).total
    risk, own = (
        [evidence[f"{what}, c = {c}"] for c in (1, 256)] for what in ("v2 risk", "ours")
    )
    parts = {"one network reads one number": abs(risk[1] / risk[0] - 1) < 0.01}
    return judged(parts, evidence, instead=abs(own[1] / own[0] - 1) < 0.01)


def _scaled_copy(c: float) -> tuple[GPT, Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, depth=3, heads=2, context=16, vocabulary=64))
    grown = ("embedding", "position", "o_proj", "down_proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in grown):
                parameter.mul_(8 * c)  # 8: clear of fp16's subnormal numbers at c = 1
    Epsilon(values={n: e * (8 * c) ** 2 for n, e in epsilons(model).items()}).apply(
        model
    )
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return model.eval(), ids


@BAEK_V1.claim("unified bound, from abstract and code", kind="theorem")
def prediction_is_vacuous() -> Found:
    """ε_mach·ΣR of a small model beside its measured fp16 error, and what R is made of.

    Claim: κ_softmax(1+κ_score)κ(V)‖W_O‖ + κ_eff + C_LN, summed, predicts the error.

    Instead: It is hundreds of thousands of times too large here and its κ_eff never
    counts: use the mean square predictor, which is within a factor of 1.5.

    Practice: Take `equipoise precision`, not sums of κ, to foresee rounding error.
    """
    model, ids = _scaled_copy(1.0)
    storage = Storage.named("fp16")
    paper = published_blocks(model, ids)
    error = Bench(model, ids).mismatch(storage)
    total = sum(block.predictor for block in paper.v1)
    share = sum(block.kappa_eff for block in paper.v1) / total
    ours = predicted(model, ids, storage=storage).total / error
    theirs = paper.v1_prediction(HALF) / error
    numbers = {
        "predicted ÷ measured, published": theirs,
        "predicted ÷ measured, ours": ours,
        "share of κ_eff in the sum": share,
    }
    parts = {"within a factor of 100": theirs < 100}
    return judged(parts, numbers, instead=1 / 1.5 < ours < 1.5)


@BAEK_V1.claim("ours, on the small-gain assumption", kind="heuristic")
def gain_is_not_small() -> Found:
    """‖W_O‖ + ‖W_1‖‖W_2‖ of a block of their Tiny-ViT at PyTorch's default start.

    Claim: The assumption ρ < 1, under which the paper relaxes residuals, is met by its
    own Tiny-ViT at the start.

    Instead: It is not: the released code takes min(0.9, ρ), and 0.9 is what is used.
    Carry a random probe through the block instead.
    """
    rng = torch.Generator().manual_seed(0)

    def norm(rows: int, columns: int) -> float:
        weight = 2 * torch.rand(rows, columns, generator=rng, dtype=torch.float64) - 1
        return float(torch.linalg.matrix_norm(weight / columns**0.5, ord=2))

    width, inner, hidden = 128, 256, 256
    rho = norm(width, inner) + norm(hidden, width) * norm(width, hidden)
    return judged({"ρ < 1": rho < 1}, {"ρ at the start": rho, "used": 0.9})


@BAEK_V1.claim("ours, on the released code: non-finite numbers", kind="heuristic")
def zeros_hide_failures() -> Found:
    """κ(V) of a head before and after one value overflows, as the released code reads.

    Claim: The indicator is at its highest at the step at which a number overflows.

    Instead: NaN and infinity are replaced by 0 before the norms, so that the reading
    falls at the very step that breaks. Whether it warns before is another question.
    Report what is not finite.
    """
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(1, 32, 8, generator=rng, dtype=torch.float64)
    v[0, 0] *= 1e4
    broken = v.clone()
    broken[0, 0] = torch.inf
    before, after = (
        float(
            kappa_value(torch.nan_to_num(x, nan=0, posinf=0, neginf=0), generator=rng)
        )
        for x in (v, broken)
    )
    numbers = {
        "κ(V) with a value of 1e4": before,
        "κ(V) after it overflows": after,
    }
    return judged({"it is highest there": after >= before}, numbers)


@BAEK_V2.claim("BGSS score", kind="heuristic")
def ranking_prefers_where_epsilon_acts_least() -> Found:
    """Two equal layers, one with a hundred times the variance: who is acted upon?

    Claim: Ranking by risk·(1 + LN dominance)·(1 + ρ_LN) finds where ε helps most.

    Instead: ρ_LN grows with σ², the effect of ε falls with it: rank by ½Δε/(σ²+ε), if ε
    is to be moved at all.
    """
    eps, width = 1e-5, 768
    evidence, scores = {}, {}
    for name, variance in (("σ² = 0.01", 0.01), ("σ² = 1", 1.0)):
        rho = variance / eps * width * HALF.unit_roundoff
        block = BlockV2(
            attention=1.0, layernorm=1.0, remainder=1.0, transport=0.0, rho_ln=rho
        )
        (scores[name],) = bgss_scores([block], final_norm=1.0, format=HALF)
        evidence[f"BGSS score, {name}"] = scores[name]
        # Six actions take ε to 1.73e-3.
        moved = 0.5 * (1.73e-3 - eps) / (variance + eps)
        evidence[f"what six actions change, {name}"] = moved
    first = scores["σ² = 0.01"] >= scores["σ² = 1"]
    return judged({"first where ε changes more": first}, evidence)


@BAEK_V2.claim("E3", kind="experiment")
def layer_ranks_need_a_null() -> Found:
    """Spearman over 12 layers by chance, and for a fixed order: the layer index.

    What two nulls explain decides nothing; beyond both, the number would stand.

    Claim: A mean Spearman of 0.362 over 12 layers: risk localises error.

    Rule: True beyond 1.96 deviations of chance and beyond the layer index alone;
    otherwise undecided.

    Instead: Windows share one layer order, so they are not independent: give the layer
    index its own row.
    """
    rng, index = np.random.default_rng(0), np.arange(LAYERS)

    def with_index(order: NDArray[Any]) -> float:
        return float(spearmanr(order, index).statistic)

    chance = [with_index(rng.permutation(LAYERS)) for _ in range(2000)]
    # Two windows of one model share most of their layer order.
    drifting = [
        with_index(index + DRIFT * rng.normal(size=LAYERS)) for _ in range(2000)
    ]
    spread, alone = float(np.std(chance)), float(np.mean(drifting))
    beyond = PUBLISHED_RANK > max(1.96 * spread, alone)
    numbers = {
        "standard deviation by chance, one window": spread,
        "0.362 in those": PUBLISHED_RANK / spread,
        "layer index alone, errors that drift with depth": alone,
    }
    return judged({"beyond both nulls": beyond or None}, numbers)


STEPS, PAIRS, OWN_PAIRS = 195, 12, 200
Array = NDArray[np.float64]


def growth_curve(rng: np.random.Generator) -> Array:
    """Return a saturating curve with AR(½) noise, like a quantity in training."""
    t = np.arange(STEPS)
    return 6 * (1 - np.exp(-t / rng.uniform(30, 80))) + memory(rng, 0.5)


def memory(rng: np.random.Generator, phi: float) -> Array:
    """Return AR(1) noise of unit innovations, after a burn-in."""
    noise = rng.normal(size=STEPS + 50)
    z = np.zeros_like(noise)
    for i in range(1, len(z)):
        z[i] = phi * z[i - 1] + noise[i]
    return z[50:]


@BAEK_V1.claim("Exp. 2", kind="experiment")
def independent_curves_pass() -> Found:
    """Pairs of independent growth curves through the released Exp-2 procedure.

    Claim: r of 0.65–0.82 at p ≈ 10⁻³ and Precision@K of 0.89–1.00 show that κ leads the
    loss.

    Instead: Detrend, prewhiten and equalise both series, then permute; report
    Precision@K as lift over the base rate. A lag of 16–24 in every seed is not
    explained by these nulls and deserves that test.

    Practice: That κ_softmax leads the loss has not been shown; two unrelated curves
    pass the test.
    """
    rng = np.random.default_rng(0)
    pairs = [(growth_curve(rng), growth_curve(rng)) for _ in range(PAIRS)]
    paper = [published_lead(x, y, permutations=999) for x, y in pairs]
    own = np.random.default_rng(1)
    ours = sum(
        lead(growth_curve(own), growth_curve(own), permutations=199).p <= 0.05
        for _ in range(OWN_PAIRS)
    )
    exact = stats.binomtest(ours, OWN_PAIRS).proportion_ci(0.95, "exact")
    alarms = [precision_at_k(x, y) for x, y in pairs]
    passing = float(np.mean([found.p <= 0.002 for found in paper]))
    numbers = {
        "independent pairs with p ≤ 0.002": passing,
        "their mean r": float(np.mean([found.r for found in paper])),
        "their mean Precision@K": float(np.mean([a.published for a in alarms])),
        "base rate of events": float(np.mean([a.base_rate for a in alarms])),
        "pairs given to our test": float(OWN_PAIRS),
        "share with p ≤ 0.05 in our test": ours / OWN_PAIRS,
        "that share, from": float(exact.low),
        "that share, to": float(exact.high),
    }
    parts = {"curves that have nothing in common do not pass": passing < 0.05}
    return judged(parts, numbers, instead=exact.low <= 0.05 <= exact.high)


@BAEK_V1.claim("Exp. 1, p of four points", kind="heuristic")
def four_points_have_no_small_p() -> Found:
    """p of r = 0.95 over four points: normal, Student's t, and all 24 orders.

    Claim: The released code's p, by a normal approximation over 4 points, is one.

    Instead: Student's t with 2 degrees of freedom; by exchange of 4 points no p is
    below 1/24.
    """
    x = np.arange(4.0)
    y = x + np.array([0.0, 0.5, -0.5, 0.0])
    r = float(np.corrcoef(x, y)[0, 1])
    t = r * math.sqrt(2 / (1 - r * r))
    normal, student = (2 * float(law.sf(t)) for law in (stats.norm, stats.t(2)))
    orders = [np.corrcoef(x, p)[0, 1] for p in itertools.permutations(y)]
    exact = float(np.mean(np.abs(orders) >= r - 1e-12))
    numbers = {
        "r": r,
        "p, normal": normal,
        "p, Student's t": student,
        "p, all orders": exact,
    }
    parts = {"as large as that of all orders": normal >= exact / 2}
    return judged(parts, numbers, instead=min(student, exact) >= 1 / 24)


@BAEK_V1.claim("Exp. 1", kind="experiment")
def collapse_is_the_format() -> Found:
    """log error against log(predictor·ε_mach) over fp32, bf16 and fp16 runs.

    Claim: That scaling by ε_mach brings all precisions onto one line shows that the
    predictor tracks the error.

    Instead: A constant and a random predictor come onto it too. Compare within one
    format, with an ε_mach-only null beside it.
    """
    rng = np.random.default_rng(0)
    spacing = np.repeat([FORMATS[n].spacing for n in ("fp32", "bf16", "fp16")], 10)
    error = 0.3 * spacing * np.exp(0.2 * rng.normal(size=30))
    error[:10] = 1e-12  # fp32 is compared with itself
    noise = np.exp(rng.normal(size=30))

    def r(predictor: Array) -> float:
        return float(np.corrcoef(np.log(predictor), np.log(error))[0, 1])

    evidence = {
        "random predictor × ε_mach": r(noise * spacing),
        "constant × ε_mach": r(spacing),
        "random predictor × ε_mach, without fp32": float(
            np.corrcoef(np.log(noise * spacing)[10:], np.log(error)[10:])[0, 1]
        ),
        "random predictor within bf16": float(
            np.corrcoef(np.log(noise)[10:20], np.log(error)[10:20])[0, 1]
        ),
    }
    null = min(r(noise * spacing), r(spacing))
    return judged({"a predictor of nothing does not": null < 0.5}, evidence)
