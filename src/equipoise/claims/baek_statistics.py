"""Baek (2025) v1: what its early-warning and correlation statistics can show."""

import numpy as np
from numpy.typing import NDArray

from equipoise.claims.verdict import Verdict
from equipoise.forecast.lead import lead, precision_at_k, published_lead
from equipoise.numerics.formats import FORMATS

V1 = "baek2025"
STEPS, PAIRS = 195, 12
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


def independent_curves_pass() -> Verdict:
    """Pairs of independent growth curves through the released Exp-2 procedure."""
    rng = np.random.default_rng(0)
    pairs = [(growth_curve(rng), growth_curve(rng)) for _ in range(PAIRS)]
    paper = [published_lead(x, y, permutations=999) for x, y in pairs]
    ours = [lead(x, y, permutations=199) for x, y in pairs]
    alarms = [precision_at_k(x, y) for x, y in pairs]
    passing = float(np.mean([found.p <= 0.002 for found in paper]))
    return Verdict(
        paper=V1,
        where="Exp. 2",
        claim="r of 0.65–0.82 at p ≈ 10⁻³ and Precision@K of 0.89–1.00 show that κ "
        "leads the loss.",
        outcome="fails" if passing > 0.5 else "holds",
        evidence={
            "independent pairs with p ≤ 0.002": passing,
            "their mean r": float(np.mean([found.r for found in paper])),
            "their mean Precision@K": float(np.mean([a.published for a in alarms])),
            "base rate of events": float(np.mean([a.base_rate for a in alarms])),
            "share with p ≤ 0.05 in our test": float(
                np.mean([found.p <= 0.05 for found in ours])
            ),
        },
        instead="Detrend, prewhiten and equalise both series, then permute; report "
        "Precision@K as lift over the base rate. A lag of 16–24 in every seed is not "
        "explained by these nulls and deserves that test.",
    )


def collapse_is_the_format() -> Verdict:
    """log error against log(predictor·ε_mach) over fp32, bf16 and fp16 runs."""
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
    return Verdict(
        paper=V1,
        where="Exp. 1",
        claim="Scaling by ε_mach collapses all precisions onto one line: the predictor "
        "tracks the error.",
        outcome="fails" if evidence["constant × ε_mach"] > 0.95 else "holds",
        evidence=evidence,
        instead="Compare within one format, with an ε_mach-only null beside it.",
    )
