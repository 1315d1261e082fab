"""Baek (v1, 2025; v2, 2026): how well its estimators work, what its ε rules do."""

import itertools
import math

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from equipoise.numerics.formats import FORMATS
from equipoise.remedies.epsilon import Bgss, NormState, noise_rule, published_rule
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2
from equipoise.theory.softmax_norms import softmax_jacobian_norm
from equipoise_lab.claims.result import BAEK_V1, BAEK_V2, Found, judged


@BAEK_V1.claim("‖J‖₂ by power iteration", kind="heuristic")
def power_iterations_read_low() -> Found:
    """‖J(p)‖₂ of 600 rows by 7 random and by 2 fixed iterations, against the exact.

    Claim: Seven (v1) or two (v2) power iterations give the norm of the Jacobian.

    Instead: The exact norm is the root of one equation: all rows, no sampling.
    """
    rng = torch.Generator().manual_seed(0)
    temperature = 2 ** (6 * torch.rand(600, 1, generator=rng, dtype=torch.float64) - 2)
    scores = torch.randn(600, 48, generator=rng, dtype=torch.float64)
    p = (temperature * scores).softmax(-1)
    exact = softmax_jacobian_norm(p)
    first = v1.softmax_gain_estimate(p, generator=rng) / exact
    second = v2.softmax_gain_estimate(p) / exact
    evidence = {
        "v1, least estimate ÷ exact": float(first.min()),
        "v1, 5th percentile": float(first.quantile(0.05)),
        "v2, least estimate ÷ exact": float(second.min()),
        "v2, 5th percentile": float(second.quantile(0.05)),
    }
    parts = {
        "v1, every row within 10 %": float(first.min()) > 0.9,
        "v2, every row within 10 %": float(second.min()) > 0.9,
    }
    return judged(parts, evidence)


@BAEK_V1.claim("κ_softmax", kind="definition")
def kappa_softmax_sees_a_common_offset() -> Found:
    """Two scores a gap of 1 apart, at offsets 0, 100 and 1000: p is the same.

    Claim: κ_softmax = ‖J‖‖s‖/‖p‖ measures how sensitive a row is.

    Instead: True only where scores are stored narrow with their offset; kernels that
    keep scores in fp32 subtract the maximum first.
    """
    evidence = {}
    for offset in (0.0, 100.0, 1000.0):
        s = torch.tensor([offset, offset + 1], dtype=torch.float64)
        p = s.softmax(-1)
        for what, z in (("", s), (", maximum subtracted", s - s.max())):
            kappa = softmax_jacobian_norm(p) * z.norm() / p.norm()
            evidence[f"κ, offset {offset:g}{what}"] = float(kappa)
    alike = [
        evidence[f"κ, offset 1000{what}"] / evidence[f"κ, offset 0{what}"]
        for what in ("", ", maximum subtracted")
    ]
    parts = {"one row has one κ": abs(alike[0] - 1) < 0.01}
    return judged(parts, evidence, instead=abs(alike[1] - 1) < 1e-9)


@BAEK_V1.claim("ε_mach, v1 against v2", kind="definition")
def two_roundoffs() -> Found:
    """v1 multiplies by the spacing 2^(1−t), v2 by the unit roundoff 2^(−t).

    Claim: Both versions scale by ε_mach, so their indicators can be compared.

    Instead: They differ by exactly 2 in every format: v1's ρ* = 0.6 is v2's 0.3. We use
    the unit roundoff and print which.
    """
    ratios = [f.spacing / f.unit_roundoff for f in FORMATS.values()]
    numbers = {
        "formats": float(len(ratios)),
        "smallest v1 ÷ v2": min(ratios),
        "largest v1 ÷ v2": max(ratios),
    }
    parts = {"one ε_mach": set(ratios) == {1.0}}
    return judged(parts, numbers, instead=set(ratios) == {2.0})


@BAEK_V1.claim("κ_score", kind="definition")
def score_ratio_is_at_least_one() -> Found:
    """κ_score of random, aligned and nearly orthogonal Q and K: exact, and as v1 reads.

    Claim: κ_score = ‖Q‖‖K‖/(√d‖S‖) ≥ 1, and large where Q and K cancel.

    Instead: True. v1 reads both its norms and ‖S‖ low, by seven power iterations from
    a random start: its value is an estimate, not a bound.
    """
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 40, 12, 8, generator=rng, dtype=torch.float64)
    q[20:, :, 4:] = 1e-3 * q[20:, :, 4:]
    k[20:, :, :4] = 1e-3 * k[20:, :, :4]
    norms = [torch.linalg.matrix_norm(m, ord=2) for m in (q, k, q @ k.mT)]
    exact = norms[0] * norms[1] / norms[2]
    read = min(float(v1.kappa_score(q[i], k[i], generator=rng)) for i in range(40))
    numbers = {
        "smallest exact κ_score": float(exact.min()),
        "smallest where Q and K are nearly orthogonal": float(exact[20:].min()),
        "smallest as v1 reads it": read,
    }
    parts = {
        "at least 1": float(exact.min()) >= 1 - 1e-12,
        "large where Q and K cancel": float(exact[20:].min()) > 10,
    }
    return judged(parts, numbers, caveat=read < 1)


@BAEK_V2.claim("χ_score", kind="definition")
def score_term_is_a_product() -> Found:
    """χ_score against κ_softmax·κ_score in Frobenius norms, masked and not.

    Claim: χ_score is a new sensitivity of the scores.

    Instead: It is κ_softmax·κ_score: v2's sum is v1's κ_softmax(1 + κ_score) but for
    how heads are put together.
    """
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for visible in (None, torch.ones(12, 12).tril().bool()):
        q, k, v = torch.randn(3, 4, 12, 8, generator=rng, dtype=torch.float64)
        found = v2.attention_v2((q, k, v), visible_NK=visible)
        score = q.norm() * k.norm() / (math.sqrt(8) * found.s)
        product = found.kappa_softmax * score
        worst = max(worst, abs(float(found.chi_score / product) - 1))
    same = worst < 1e-12
    numbers = {"largest relative difference": worst}
    parts = {"it is not κ_softmax·κ_score": not same}
    return judged(parts, numbers, instead=same)


@BAEK_V2.claim("LN magnitude, per token", kind="lemma")
def norm_coefficient_is_loose() -> Found:
    """(ε+2v)/(v+ε)^{3/2} with each token's own variance, beside the exact gain.

    Claim: The coefficient bounds the gain of LayerNorm.

    Instead: It does, by a factor of up to 2; the exact gain is 1/√(v+ε).
    """
    rng = torch.Generator().manual_seed(0)
    scale = torch.logspace(-5, 2, 60, dtype=torch.float64)[:, None]
    x, eps = scale * torch.randn(60, 8, generator=rng, dtype=torch.float64), 1e-5
    J = torch.func.vmap(torch.func.jacrev(lambda row: _layer_norm(row, eps)))(x)
    v = x.var(-1, correction=0)
    ratio = (eps + 2 * v) / (v + eps) ** 1.5 / torch.linalg.matrix_norm(J, ord=2)
    numbers = {
        "smallest coefficient ÷ gain": float(ratio.min()),
        "largest coefficient ÷ gain": float(ratio.max()),
    }
    parts = {"no gain exceeds it": float(ratio.min()) >= 1 - 1e-9}
    return judged(parts, numbers, caveat=float(ratio.max()) > 1.5)


@BAEK_V2.claim("E1", kind="experiment")
def analytic_checks() -> Found:
    """v2's E1 in float64: attention, LayerNorm and residual against their terms.

    Claim: Each term follows the error it stands for (Pearson and Spearman ≥ 0.9).

    Instead: One variable moves at a time, σ² is far below ε throughout, and the
    residual bound holds by construction (‖T‖ = 1+ρ): no network is tested.
    """
    attention, norm, residual = _attention_pairs(), _norm_pairs(), _residual_pairs()
    evidence = {}
    for name, (term, seen) in {
        "attention": attention,
        "LayerNorm": norm,
        "residual": residual,
    }.items():
        evidence[f"{name}: Pearson"] = float(np.corrcoef(term, seen)[0, 1])
        evidence[f"{name}: Spearman"] = float(spearmanr(term, seen).statistic)
    within = all(s <= t * (1 + 1e-12) for t, s in zip(*residual, strict=True))
    evidence["residual: bound respected"] = float(within)
    evidence["LayerNorm: σ²/ε at ε = 1e-6 … 3e-2"] = 1.25e-6 / 3e-2
    parts = {
        name: min(evidence[f"{name}: {r}"] for r in ("Pearson", "Spearman")) >= 0.9
        for name in ("attention", "LayerNorm", "residual")
    }
    return judged(parts, evidence)


def _attention_pairs() -> tuple[list[float], list[float]]:
    """Return (term, ‖ΔP·V‖) for a score moved by a relative 0.0025."""
    terms, moved = [], []
    for margin, size in itertools.product((0.25, 0.5, 1, 2, 4), (0.5, 1, 2, 4)):
        s = torch.tensor([margin, 0.0], dtype=torch.float64)
        v = size * torch.eye(2, dtype=torch.float64)
        p = s.softmax(-1)
        gain = float(softmax_jacobian_norm(p))
        terms.append(gain * float((0.0025 * s).norm()) * size)
        moved.append(float((((1.0025 * s).softmax(-1) - p) @ v).norm()))
    return terms, moved


def _norm_pairs() -> tuple[list[float], list[float]]:
    """Return (v2's coefficient, the norm's true gain on a small push) over ε."""
    x = torch.tensor([1.0, 1.001, 0.999, 1.002], dtype=torch.float64)
    push = 1e-7 * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    terms, moved = [], []
    for eps in np.geomspace(1e-6, 3e-2, 10):
        v = float(x.var(correction=0))
        terms.append((eps + 2 * v) / math.sqrt(v + eps) ** 3)
        gain = (_layer_norm(x + push, eps) - _layer_norm(x, eps)).norm() / push.norm()
        moved.append(float(gain))
    return terms, moved


def _layer_norm(x: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape, eps=float(eps))


def _residual_pairs() -> tuple[list[float], list[float]]:
    """Return ((1+ρ)⁶, how much six residual blocks grow a push) over ρ."""
    terms, moved = [], []
    for rho in np.linspace(0, 0.6, 7):
        block = torch.diag(torch.tensor([1 + rho, 1 - rho / 4], dtype=torch.float64))
        push = torch.tensor([1.0, 1.0], dtype=torch.float64) / math.sqrt(2)
        terms.append((1 + rho) ** 6)
        moved.append(float((torch.linalg.matrix_power(block, 6) @ push).norm()))
    return terms, moved


HALF = FORMATS["fp16"]
USUAL_VARIANCE = 1e-2
"""Tokens of trained networks have at least this much before a norm."""


@BAEK_V1.claim("ours, on Exp. 3: whether the rule acts", kind="heuristic")
def intervention_never_fires() -> Found:
    """The trigger ρ_LN < 1 at D = 128 in fp16, over token variances of real norms.

    Claim: The rule "raise ε when ρ_LN < 1" changes ε at the token variances of real
    norms (σ² ≥ 0.01).

    Instead: It changes none. Pre-norm activations have σ² near 1: the rule is a no-op
    there, and both arms of the experiment are the same network from different seeds.

    Practice: Raising ε by the published rule changes nothing.
    """

    def fired(variance: float) -> float:
        state = NormState(variance=variance, power=variance, width=128, eps=1e-5)
        return published_rule(state, HALF) / 1e-5

    variances = [10.0**e for e in range(-8, 3)]
    growth = {v: fired(v) for v in variances}
    usual = max(growth[v] for v in variances if v >= USUAL_VARIANCE)
    finest = max(fired(10 ** (-8 + 4.2 * i / 400)) for i in range(400))
    noisy = NormState(variance=1e-6, power=1.0, width=128, eps=1e-5)
    numbers = {
        "largest σ² at which it can fire": 1e-5 / (128 * HALF.spacing),
        "largest change of ε for σ² ≥ 0.01": usual,
        "largest change of ε for any σ²": finest,
        "the cap, as a change of ε": 1e-2 / 1e-5,
        "noise rule, mean 1 and σ² = 1e-6": noise_rule(noisy, HALF) / 1e-5,
    }
    return judged({"it changes ε": usual != 1.0}, numbers)


@BAEK_V2.claim("BGSS, budget", kind="heuristic")
def cap_never_binds() -> Found:
    """The ladder of ε that the controller can climb, and its cap.

    Claim: ε is raised up to a cap of 1e-2.

    Instead: Six actions a layer, each smaller than the last, end at 1.7e-3: the cap
    never acts, so it is not a setting.
    """
    controller = Bgss(layers=1)
    for step in range(1000):
        controller.step(step, total_risk=1.0, scores=[1.0])
    reached, cap = controller.eps[0], 1e-2
    numbers = {
        "actions": float(controller.actions[0]),
        "largest ε": reached,
        "the cap": cap,
    }
    return judged({"the cap is reached": reached >= cap}, numbers)


@BAEK_V2.claim("E5, onset events", kind="experiment")
def events_of_three_seeds() -> Found:
    """32 onsets with BGSS against 35 with random layers, three seeds each.

    Equal rates make the first count binomial with ½ of the sum.

    Claim: BGSS has fewer onsets than the same budget spent at random.

    Rule: One-sided p of the printed counts below 0.05; otherwise undecided.

    Instead: 32 of 67 is what a coin gives. What 4 chances in 5 of seeing so small a
    difference would take is in the evidence.
    """
    ours, other = 32, 35
    total, share = ours + other, ours / (ours + other)
    p = sum(math.comb(total, n) for n in range(ours + 1)) / 2**total
    needed = ((1.6449 + 0.8416) / 2 / (0.5 - share)) ** 2
    numbers = {
        "p, one-sided": p,
        "events that would decide it": needed,
        "events there are": float(total),
    }
    return judged({"fewer than with chance": p < 0.05 or None}, numbers)


@BAEK_V2.claim("BGSS", kind="experiment")
def bgss_moves_little() -> Found:
    """All six allowed actions on one layer, and what that changes at σ² = 1.

    An error behind a norm scales with its gain, 1/√(σ²+ε): ε alone cuts it by 63 % at
    one σ² only. Where usual activations are far above, only runs could tell the rest.

    Claim: Raising ε of risky layers cuts the worst mismatch by 63 %.

    Rule: True if ε alone can do it at usual variances; otherwise undecided, because
    only the authors' runs could tell what else did.

    Instead: The budget moves a norm of unit variance by under 0.1 %. The effect needs ≥
    10 paired seeds, a do-nothing arm, and the same windows in each arm.
    """
    controller = Bgss(layers=1)
    for step in range(400):
        controller.step(step, total_risk=1.0, scores=[1.0])
    eps = controller.eps[0]
    change, kept = 0.5 * (eps - 1e-5) / (1 + eps), (1 - 0.63) ** 2
    reach = (kept * eps - 1e-5) / (1 - kept)
    numbers = {
        "actions": float(controller.actions[0]),
        "final ε": eps,
        "relative change of the norm's output at σ² = 1": change,
        "largest σ² at which ε alone cuts an error by 63 %": reach,
        "least σ² of tokens before a norm, in trained networks": USUAL_VARIANCE,
    }
    return judged({"ε alone can do it": reach >= USUAL_VARIANCE or None}, numbers)
