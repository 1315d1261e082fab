"""Emadi (2026), §3–§6: norms, layer bounds, depth scaling, and the reported numbers.

Axes, in this file:  B trial · K token or key · D model width · N layer.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import layer_norm

from equipoise.numerics.norms import block_norm, layer_norm_gain, rms
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.scaling import deepnorm, deepnorm_original, path_gain
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.claims.emadi import brute_force
from equipoise_lab.claims.result import EMADI, Found, judged
from equipoise_lab.theory.lipschitz.joint import dual_rows
from equipoise_lab.theory.lipschitz.layers import (
    feedforward_bound,
    norm_local,
    post_norm,
    pre_norm,
)
from equipoise_lab.theory.lipschitz.published import (
    castin_bound,
    emadi_ball,
    emadi_local,
)

ROUNDING = 1e-12
"""Far above the rounding of float64 sums here, far below any effect."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


@EMADI.claim("Thm 4.2", kind="theorem")
def balanced_mass() -> Found:
    """θ against every sign vector on the autograd Jacobian: no formula in common.

    Claim: For p = softmax(u/τ), τ > 0, ‖J‖ from ∞ to 1 is exactly θ(p)/τ.

    Instead: It is; random, peaked, tied and nearly uniform rows, three temperatures.

    Practice: θ as `watch` reads it is the exact sensitivity of a row of attention.
    """
    rng = _generator()
    z = _normal(60, 9, rng=rng) * torch.logspace(-3, 1.2, 60)[:, None].double()
    z[::7, :4] = z[::7, :1]
    worst = 0.0
    for tau in (0.1, 1.0, 10.0):
        theta = balance((z / tau).softmax(-1))
        error = (theta.lower - tau * brute_force(z, tau)).abs().max()
        worst = max(worst, float(error))
    numbers = {"rows": 3.0 * len(z), "largest |θ − τ‖J‖|": worst}
    return judged({"they are equal": worst < ROUNDING}, numbers)


@EMADI.claim("Cor. 4.3(1), (2), (4)", kind="corollary")
def regimes() -> Found:
    """The closed forms for uniform, one-hot and top-k uniform rows, in rationals.

    Claim: Uniform rows have θ = 1 (even L) or 1 − 1/L² (odd L), one-hot rows 0, and
    rows uniform over k keys 1 − (1 − 2⌊k/2⌋/k)².

    Instead: As stated; exact over the rationals for every k up to 64.
    """
    wrong = 0
    for k in range(1, 65):
        share = Fraction(k // 2, k)
        theta = 4 * share * (1 - share)
        stated = 1 - (1 - 2 * share) ** 2
        uniform = Fraction(1) if k % 2 == 0 else 1 - Fraction(1, k * k)
        wrong += theta != stated or theta != uniform
    p = torch.zeros(64, 96, dtype=torch.float64)
    for k in range(1, 65):
        p[k - 1, :k] = 1 / k
    sizes = torch.arange(1, 65, dtype=torch.float64)
    share_K = (sizes / 2).floor() / sizes
    exact = 4 * share_K * (1 - share_K)
    error = float((balance(p).lower - exact).abs().max())
    numbers = {
        "sizes at which the closed forms differ": float(wrong),
        "largest error of the kernel": error,
    }
    return judged({"every size": not wrong and error < ROUNDING}, numbers)


@EMADI.claim("§4, θ beside entropy", kind="definition")
def theta_is_not_entropy() -> Found:
    """Two rows with one entropy and different θ; two with one θ and other entropies.

    Claim: θ measures something that the entropy of a row does not.

    Instead: True: neither is a function of the other.
    """
    uniform = torch.full((2,), 0.5, dtype=torch.float64)
    spread = torch.full((64,), 1 / 64, dtype=torch.float64)
    target = math.log(2.0)
    low, high = 0.5, 1.0 - 1e-9
    for _ in range(200):  # one key of mass a over 255 others, entropy ln 2
        a = (low + high) / 2
        rest = (1 - a) / 255
        low, high = (a, high) if _entropy(_peak(a, rest, 255)) > target else (low, a)
    peaked = _peak(low, (1 - low) / 255, 255)
    same_entropy = abs(_entropy(peaked) - _entropy(uniform))
    theta = [float(balance(p).lower) for p in (uniform, peaked, spread)]
    parts = {
        "one entropy, two θ": same_entropy < 1e-9 and theta[0] - theta[1] > 0.01,
        "one θ, two entropies": _entropy(spread) - _entropy(uniform) > 1,
    }
    numbers = {
        "θ of (½, ½)": theta[0],
        "θ of a peaked row with the same entropy": theta[1],
        "θ of 64 equal keys": theta[2],
        "difference of the two entropies": same_entropy,
        "entropy of (½, ½)": _entropy(uniform),
        "entropy of 64 equal keys": _entropy(spread),
    }
    return judged(parts, numbers)


def _peak(top: float, rest: float, keys: int) -> Tensor:
    return torch.tensor([top] + [rest] * keys, dtype=torch.float64)


def _entropy(p_K: Tensor) -> float:
    return float(-(p_K * p_K.log()).sum())


@EMADI.claim("Lemma 3.2", kind="lemma")
def mixing_does_not_expand() -> Found:
    """Row-stochastic mixing in the block-∞/RMS norm, over random and one-hot rows.

    Claim: ‖PX‖_{∞,rms} ≤ ‖X‖_{∞,rms} for every row-stochastic P.

    Instead: As stated; a copy of the longest token attains it.
    """
    rng = _generator()
    scale = torch.logspace(-3, 3, 200, dtype=torch.float64)[:, None, None]
    x = _normal(200, 12, 16, rng=rng) * scale
    p = (_normal(200, 12, 12, rng=rng) * scale).softmax(-1)
    ratio = float((block_norm(p @ x) / block_norm(x)).max())
    numbers = {"trials": 200.0, "largest ‖PX‖/‖X‖": ratio}
    return judged({"it never expands": ratio <= 1 + ROUNDING}, numbers)


@EMADI.claim("Lemma 3.3", kind="lemma")
def norm_resets_magnitude() -> Found:
    """LayerNorm's output magnitude, searched by gradient ascent for a larger one.

    Claim: ‖LN(x)‖_rms ≤ ‖γ‖_∞ + ‖β‖_∞.

    Instead: As stated. It is attained where |γ| and |β| are constant and β points along
    γ⊙x̂, as for x = ±1; a constant β is orthogonal to x̂ and reaches 0.707 of it.
    """
    rng = _generator()
    x = _normal(64, 8, rng=rng).requires_grad_()
    gamma, beta = _normal(64, 8, rng=rng), _normal(64, 8, rng=rng)
    bound = gamma.abs().amax(-1) + beta.abs().amax(-1)
    optimizer = torch.optim.Adam([x], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (-(rms(layer_norm(x, (8,), eps=1e-5) * gamma + beta) / bound)).sum().backward()
        optimizer.step()
    signs = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    along, constant = (
        float(rms(layer_norm(signs, (8,), eps=0.0) + shift)) / 2
        for shift in (signs, torch.ones_like(signs))
    )
    with torch.no_grad():
        found = rms(layer_norm(x, (8,), eps=1e-5) * gamma + beta) / bound
    largest = max(float(found.max()), along)
    numbers = {
        "γ = 1, β along x̂": along,
        "γ = β = 1": constant,
        "ascents": 64.0,
        "largest ‖LN(x)‖/(‖γ‖ + ‖β‖)": float(found.max()),
    }
    return judged({"nothing exceeds it": largest <= 1 + ROUNDING}, numbers)


@EMADI.claim("Lemma A.1", kind="lemma")
def norm_constant_is_true_and_empty() -> Found:
    """The global Lipschitz bound of LayerNorm beside its exact local value.

    Claim: Lip(LN) ≤ ‖γ‖_∞/√ε.

    Instead: True, and attained only at σ² ≪ ε: 316·‖γ‖_∞ at ε = 1e-5, where a token of
    unit variance has ‖γ‖_∞/σ. Use the local value, which a probe reads.
    """
    rng = _generator()
    scale = torch.logspace(-6, 1, 40, dtype=torch.float64)[:, None]
    x, eps = _normal(40, 8, rng=rng) * scale, 1e-5
    J = vmap(jacrev(lambda row: layer_norm(row, (8,), eps=eps)))(x)
    norm = torch.linalg.matrix_norm(J, 2)
    local = layer_norm_gain(x, torch.ones(8).double(), eps=eps).upper
    bound, unit = 1 / math.sqrt(eps), norm[(scale[:, 0] - 1).abs().argmin()]
    valid = float((norm / bound).max()) <= 1 + ROUNDING
    error = float((norm / local - 1).abs().max())
    numbers = {
        "the bound": bound,
        "largest ‖J‖": float(norm.max()),
        "‖J‖ at a token of about unit variance": float(unit),
        "largest relative error of 1/σ": error,
    }
    parts = {"nothing exceeds it": valid and error < 1e-9}
    return judged(parts, numbers, caveat=float(unit) < 0.1 * bound)


def _heads(rng: torch.Generator, *, gain: float = 1.0) -> Heads:
    heads, width, each = 4, 32, 8
    q, k, v = (gain * _normal(heads, width, each, rng=rng) / 32**0.5 for _ in range(3))
    out = gain * _normal(heads, each, width, rng=rng) / 32**0.5
    return Heads(w_q_HDE=q, w_k_GDE=k, w_v_GDF=v, w_o_HFD=out)


@EMADI.claim("Thm 5.1, validity and tightness", kind="theorem")
def attention_bound_is_loose() -> Found:
    """Thm 5.1 at the input, beside a dual bracket of the local constant.

    Claim: L_MHA ≤ ‖W_O‖ Σ_h (‖W_V‖ + θ̃/τ·Φ_h), Φ_h = 2B̄²/√d_h·‖W_Q‖‖W_K‖‖W_V‖, B̄ the
    length of the longest token and θ̃ the largest θ of a row.

    Rule: It holds if no ratio of bound to truth is below 1; with a caveat if one is
    above 10.

    Instead: A valid bound of the derivative at the input, 39 to 115 times too large at
    the three gains tried; the
    joint bound of ``theory.lipschitz`` is within a small factor.

    Practice: Theorem 5.1 is valid and far too large to act on; read
    `attention.lipschitz` instead.
    """
    rng = _generator()
    looseness = []
    for gain in (0.3, 1.0, 2.0):
        heads, x = _heads(rng, gain=gain), _normal(16, 32, rng=rng)
        truth = float(dual_rows(attend(heads, x)).lower.max())
        looseness.append(emadi_local(heads, x).value / truth)
    numbers = {
        "smallest bound ÷ truth": min(looseness),
        "largest bound ÷ truth": max(looseness),
    }
    parts = {"nothing exceeds it": min(looseness) >= 1 - ROUNDING}
    return judged(parts, numbers, caveat=max(looseness) > 10)


@EMADI.claim("§5, length-independence", kind="theorem")
def length_does_not_enter() -> Found:
    """Over the length: the block-∞ bound, what it bounds, and a Frobenius bound.

    Claim: In the block-∞ norm the bound does not grow with the context; Frobenius
    bounds grow like √L.

    Instead: As stated, for tokens inside one ball; one bound covers every length.

    Practice: Readings of `lipschitz.*` at two context lengths can be compared.
    """
    rng = _generator()
    heads, lengths = _heads(rng, gain=2.0), (8, 16, 48)
    bound = emadi_ball(heads, radius=1.0).value
    truths = []
    for n in lengths:
        x = torch.nn.functional.normalize(_normal(n, 32, rng=rng), dim=-1)
        truths.append(float(dual_rows(attend(heads, x)).lower.max()))
    ends = [castin_bound(heads, radius=1.0, tokens=n).value for n in (64, 4096)]
    slopes = [
        math.log(truths[-1] / truths[0]) / math.log(lengths[-1] / lengths[0]),
        math.log(ends[1] / ends[0]) / math.log(64),
    ]
    parts = {
        "one bound covers every length": max(truths) <= bound and slopes[0] < 0.1,
        "Frobenius grows like √L": abs(slopes[1] - 0.5) < 0.02,
    }
    numbers = {
        "block-∞ bound at every length": bound,
        **{f"measured, L = {n}": t for n, t in zip(lengths, truths, strict=True)},
        "exponent of what is measured over L": slopes[0],
        "exponent of the Frobenius bound over L": slopes[1],
    }
    return judged(parts, numbers)


@EMADI.claim("App. C.2 and C.3, one sublayer", kind="theorem")
def residual_forms() -> Found:
    """Sublayer bounds of pre-LN and post-LN against a feed-forward block's Jacobian.

    Claim: A pre-LN sublayer is bounded by 1 + Lip(LN)·L, a post-LN sublayer by
    Lip(LN)(1 + L), and J_LN·1 = 0.

    Instead: As stated. What the theorems say of whole layers and of products of them
    is ``pre_layer``, ``post_layer``, ``identity_expansion`` and ``post_norm_product``.
    """
    rng = _generator()
    w_in, w_out = (_normal(16, 16, rng=rng) / 4 for _ in range(2))
    x, eps = _normal(8, 16, rng=rng), 1e-5

    def branch(row: Tensor) -> Tensor:
        return (row @ w_in).relu() @ w_out

    def norm(row: Tensor) -> Tensor:
        return layer_norm(row, (16,), eps=eps)

    bound = feedforward_bound(w_in, w_out, activation="relu")
    ratios = []
    for form, rule, at in (
        (lambda r: r + branch(norm(r)), pre_norm, x),
        (lambda r: norm(r + branch(r)), post_norm, x + branch(x)),
    ):
        true = torch.linalg.matrix_norm(vmap(jacrev(form))(x), 2).max()
        gain = norm_local(layer_norm_gain(at, torch.ones(16).double(), eps=eps))
        ratios.append(float(true) / rule(bound, norm=gain).value)
    along = float((vmap(jacrev(norm))(x) @ torch.ones(16).double()).abs().max())
    parts = {
        "pre-LN": ratios[0] <= 1 + ROUNDING,
        "post-LN": ratios[1] <= 1 + ROUNDING,
        "J_LN·1 = 0": along < ROUNDING,
    }
    return judged(
        parts,
        {
            "truth ÷ bound, pre-LN": ratios[0],
            "truth ÷ bound, post-LN": ratios[1],
            "largest |J_LN·1|": along,
        },
    )


@EMADI.claim("Thms 6.1 and 6.2, arithmetic", kind="theorem")
def path_exponent() -> Found:
    """N·β^m for β = N^(−1/m) and for a constant β, at four depths.

    Claim: If a layer contributes C·β^m, then N layers contribute O(1) for β =
    N^(−1/m), and not for a constant β.

    Instead: True as arithmetic. Which m an architecture has is ``path_counts``. Of what
    trains it is not: the measured exponents are in
    ``published_results.exponents_of_training``.
    """
    depths = (2, 8, 32, 128)
    spread = max(
        abs(n * path_gain(n, maps=m) ** m - 1) for n in depths for m in (2, 3, 4)
    )
    fixed = [n * 0.5**4 for n in depths]
    parts = {
        "O(1) for β = N^(−1/m)": spread < ROUNDING,
        "not for a constant β": fixed[-1] > 10 * fixed[0],
    }
    return judged(
        parts,
        {
            "largest |N·β^m − 1|": spread,
            "N·β⁴ at N = 2 for a constant β = ½": fixed[0],
            "N·β⁴ at N = 128 for a constant β = ½": fixed[-1],
        },
    )


@EMADI.claim("Thm 6.1 and DeepNorm, two forms", kind="definition")
def deepnorm_forms_agree() -> Found:
    """LN(x + αf) with α = (2N)^(−1/4) beside the original LN(ax + f), a = (2N)^(1/4).

    Claim: DeepNorm multiplies the branch by (2N)^(−1/4).

    Instead: The original multiplies the stream by (2N)^(1/4); the two are equal up to
    ε because the norm is scale-free. Its gains (8N)^(−1/4) are on W_V, W_O and the
    feed-forward net, not on W_Q and W_K, and are part of the recipe.

    Practice: Either form of DeepNorm will do. Its gains belong to it, though at 24
    layers it trained without them.
    """
    rng = _generator()
    x, f = _normal(32, 64, rng=rng), _normal(32, 64, rng=rng)
    worst = 0.0
    for depth in (4, 24, 96):
        theirs, original = deepnorm(depth), deepnorm_original(depth)
        a = layer_norm(x + theirs.branch * f, (64,), eps=1e-12)
        b = layer_norm(original.skip * x + f, (64,), eps=1e-12)
        worst = max(worst, float((a - b).abs().max()))
    original = deepnorm_original(24)
    numbers = {
        "largest difference of the two forms": worst,
        "gain that belongs to it, on W_V and W_O, N = 24": original.gain,
    }
    parts = {"the two are one layer": worst < 1e-9}
    return judged(parts, numbers, caveat=original.gain < 1)


@EMADI.claim("Table 1, 51.45 and 61.15", kind="experiment")
def losses_are_sums() -> Found:
    """The reported final losses beside what a language model of this size can have.

    Claim: The final loss (cross-entropy) is 51.45 for pre-LN and 61.15 for post-LN.

    Rule: A number without a unit is undecided, unless it cannot be in the usual one
    and dividing by nothing else the paper names makes it plausible (then refuted).

    Instead: The unit is not stated. Nats per token they are not: a uniform guess over
    50,257 words has 10.82. Divided by the 16 accumulated micro-batches they would be
    3.216 and 3.822, which is our inference.
    """
    uniform, batches = math.log(50257), 16
    pre, post = 51.45 / batches, 61.15 / batches
    plausible = 2.5 < pre < post < 4.5
    per_token = pre * batches <= uniform
    return judged(
        {"its unit": True if per_token else None if plausible else False},
        {
            "nats per token of a uniform guess": uniform,
            "pre-LN ÷ 16": pre,
            "post-LN ÷ 16": post,
        },
    )
