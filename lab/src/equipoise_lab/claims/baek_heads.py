"""Baek (2025) v1 and v2: what their indicators say of one head or one norm."""

import math

import torch
from torch import Tensor

from equipoise.numerics.formats import FORMATS
from equipoise.numerics.fragility import head_error, norm_condition
from equipoise.numerics.rounding import rounded
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2
from equipoise_lab.claims.result import BAEK_V1, BAEK_V2, Found, judged
from equipoise_lab.theory.fragility_bounds import conditions

HALF = FORMATS["fp16"]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _half_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's output, exact and with everything stored in fp16."""
    exact = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v @ w
    q, k, v, w = (rounded(x, HALF) for x in (q, k, v, w))
    s = rounded(q @ k.mT / math.sqrt(q.shape[-1]), HALF)
    a = rounded(rounded(s.softmax(-1), HALF) @ v, HALF)
    return exact, rounded(a @ w, HALF)


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@BAEK_V1.claim("unified predictor", kind="definition")
def not_unitless() -> Found:
    """V → cV and W_O → W_O/c with c a power of two leaves every bit as it was.

    Claim: The predictor is unitless and comparable across networks.

    Instead: Networks that are the same bit for bit get attention terms 8× apart, while
    C_LN and κ_eff stay: the sum has no units. Divide by what each stage writes (κ_val,
    κ_proj), or predict the mean square error.
    """
    q, k, v = _normal(3, 32, 16)
    w = _normal(16, 64, seed=1) / 4
    evidence = {}
    for c in (1.0, 2.0, 8.0):
        exact, found = _half_head(q, k, v * c, w / c)
        rng = torch.Generator().manual_seed(0)
        spectral = float(torch.linalg.matrix_norm(w / c, ord=2))
        evidence[f"measured error, c = {c:g}"] = _relative(found, exact)
        # κ(V) does not see c, ‖W_O‖₂ does: the product is not scale-free.
        kappa = float(v1.kappa_value(v * c, generator=rng))
        evidence[f"v1 κ(V)‖W_O‖₂, c = {c:g}"] = kappa * spectral
        ours = head_error((q, k, v * c), w / c, format=HALF)
        evidence[f"ours, c = {c:g}"] = float(ours.relative)
    first, last = (evidence[f"v1 κ(V)‖W_O‖₂, c = {c}"] for c in (1, 8))
    own = [evidence[f"ours, c = {c}"] for c in (1, 8)]
    parts = {"one network reads one number": abs(last / first - 1) < 0.01}
    return judged(parts, evidence, instead=abs(own[1] / own[0] - 1) < 1e-4)


@BAEK_V1.claim("κ_softmax, aggregated", kind="definition")
def row_maximum_is_no_bound() -> Found:
    """The factor, the matrix form and the measured error: one flat and one sure row.

    Claim: max over rows of ‖J(p)‖‖s‖/‖p‖, times 1+κ_score, bounds ‖ΔP‖/(u‖P‖).

    Instead: Use the matrix form max‖J‖·‖S‖/‖P‖ with Frobenius κ_score.
    """
    q, k = _blind_rows()
    root = math.sqrt(q.shape[-1])
    wide = q @ k.mT / root
    stored = rounded(rounded(q, HALF) @ rounded(k, HALF).mT / root, HALF)
    rows = wide.softmax(-1)
    moved = float((stored.softmax(-1) - rows).norm() / rows.norm())
    rng = torch.Generator().manual_seed(0)
    row = float(v1.kappa_softmax(wide, generator=rng))
    score = float(v1.kappa_score(q[None], k[None], generator=rng))
    matrix = conditions((q, k, k), torch.eye(k.shape[1], dtype=torch.float64))
    factor = float(matrix.softmax * (1 + 2 * matrix.score))
    needed = moved / HALF.unit_roundoff
    numbers = {
        "row maximum × (1 + κ_score)": row * (1 + score),
        "measured ‖ΔP‖/(u‖P‖)": needed,
        "matrix form": factor,
    }
    parts = {"it bounds what was measured": needed <= row * (1 + score)}
    return judged(parts, numbers, instead=needed <= factor)


def _blind_rows() -> tuple[Tensor, Tensor]:
    """Return a query every key is orthogonal to, one that is sure, and four keys."""
    flat, k = 20 * _normal(1, 16), 20 * _normal(4, 16, seed=1)
    k = k - (k @ flat.mT) / flat.square().sum() * flat
    return torch.cat([flat, k[:1]]), k


@BAEK_V1.claim("κ(V)", kind="definition")
def value_condition_misleads() -> Found:
    """κ(V) beside ‖P‖‖V‖₂/‖PV‖, for a centred V and for one with a thin column.

    Claim: The condition number of V says how much PV amplifies errors of P.

    Instead: κ_val = ‖P‖‖V‖₂/‖PV‖. With more tokens than head channels, σ_min(V) bounds
    nothing from below.
    """
    centred = _normal(65, 64)
    centred = centred - centred.mean(0)
    thin = _normal(65, 64, seed=1)
    thin[:, 0] *= 1e-7
    evidence = {}
    for name, v in (("centred", centred), ("thin column", thin)):
        p = torch.full((65, 65), 1 / 65, dtype=torch.float64)
        if name == "thin column":
            p = _normal(65, 65, seed=2).softmax(-1)
        rng = torch.Generator().manual_seed(0)
        true = p.norm() * torch.linalg.matrix_norm(v, ord=2) / (p @ v).norm()
        evidence[f"κ(V), {name}"] = float(v1.kappa_value(v[None], generator=rng))
        evidence[f"κ_val, {name}"] = float(true)
    blind = evidence["κ_val, centred"] > 1e6 * evidence["κ(V), centred"]
    alarmed = evidence["κ(V), thin column"] > 1e3 * evidence["κ_val, thin column"]
    return judged(
        {
            "low where V is centred": not blind,
            "high only where it matters": not alarmed,
        },
        evidence,
    )


@BAEK_V1.claim("κ_eff, from the released code", kind="definition")
def weight_condition_misleads() -> Found:
    """κ(W) of a weight with one tiny singular value, and what it does to rounding.

    Claim: κ_eff = κ(W_1) + κ(W_2) + κ(W_O) is part of the relative error.

    Instead: κ_lin = ‖W‖‖X‖/‖XW‖, which inputs off the weak direction keep small.
    """
    x, w = _normal(64, 16), _normal(16, 16, seed=1)
    w[:, 0] *= 1e-7
    condition = float(torch.linalg.cond(w))
    exact, found = x @ w, rounded(x, HALF) @ rounded(w, HALF)
    amplified = float(torch.linalg.matrix_norm(w, ord=2) * x.norm() / exact.norm())
    error = _relative(found, exact) / HALF.unit_roundoff
    numbers = {"κ(W)": condition, "κ_lin": amplified, "measured error ÷ u": error}
    parts = {"the error has its size": condition < 1e3 * error}
    # Two roundings of the operands, each amplified by κ_lin at most.
    return judged(parts, numbers, instead=error <= 2 * amplified)


@BAEK_V1.claim("C_LN and ρ_LN, from the released code", kind="definition")
def epsilon_does_not_set_the_error() -> Found:
    """C_LN, ρ_LN and the measured error of LayerNorm at two ε, σ² = 1, D = 128.

    Claim: LayerNorm error grows with σ/√ε + σ²/ε; ρ_LN < 1 means ε dominates.

    Instead: The amplifier is κ_LN = ‖x‖/(√D σ), which does not depend on ε; whether ε
    dominates is r_ε = ε/(σ²+ε).
    """
    x = _normal(512, 128)
    evidence = {}
    for eps in (1e-2, 1e-6):
        exact = torch.nn.functional.layer_norm(x, (128,), eps=eps)
        found = torch.nn.functional.layer_norm(rounded(x, HALF), (128,), eps=eps)
        evidence[f"C_LN, ε = {eps:g}"] = float(v1.c_ln(x, eps=eps))
        evidence[f"ρ_LN, ε = {eps:g}"] = float(v1.rho_ln(x, eps=eps, format=HALF))
        evidence[f"measured error, ε = {eps:g}"] = _relative(
            rounded(found, HALF), exact
        )
    share = norm_condition(x, eps=1e-5, statistics=FORMATS["fp32"]).epsilon_share
    fp32 = v1.rho_ln(math.sqrt(0.6) * x, eps=1e-5, format=FORMATS["fp32"])
    evidence["ρ_LN in fp32, σ² = 0.6 (claimed ε-dominated below 1)"] = float(fp32)
    evidence["σ²/ε there"] = 0.6 / 1e-5
    evidence["largest r_ε, ε = 1e-5"] = float(share.max())
    change = (
        evidence["measured error, ε = 0.01"] / evidence["measured error, ε = 1e-06"]
    )
    return judged({"the error moves with ε": abs(change - 1) > 0.1}, evidence)


@BAEK_V2.claim("LN magnitude", kind="definition")
def token_mean_variance_hides_small_tokens() -> Found:
    """The coefficient at the mean variance, and the largest gain of any token.

    Claim: (ε+2v)/(v+ε)^{3/2} with the mean token variance bounds the norm's gain.

    Instead: Use each token's own variance; the exact gain is 1/√(v+ε).
    """
    x = torch.cat([_normal(200, 64) * 1e-2, _normal(56, 64, seed=1) * 30])
    eps = 1e-5
    v = float(x.var(-1, correction=0).mean())
    published = (eps + 2 * v) / math.sqrt(v + eps) ** 3
    gain = float((1 / (x.var(-1, correction=0) + eps).sqrt()).max())
    numbers = {"published coefficient": published, "largest true gain": gain}
    return judged({"no gain exceeds it": gain <= published}, numbers)


@BAEK_V2.claim("transport surrogate", kind="heuristic")
def norm_ratio_is_no_transport() -> Found:
    """‖f(x)‖/‖x‖ instead of a Jacobian norm: a constant branch, and a fast sine.

    Claim: ‖f(x)‖/‖x‖ stands for how much a branch amplifies earlier errors.

    Instead: Carry random output probes back: one backward pass gives every module's
    transport.
    """
    x = torch.linspace(0.1, 1.3, 64, dtype=torch.float64)
    step = 1e-6
    here, beside = (torch.sin(1e3 * z) / 1e3 for z in (x, x + step))
    slope = float(((beside - here) / step).abs().max())
    constant = float(torch.full_like(x, 5.0).norm() / torch.ones_like(x).norm())
    ratio = float(here.norm() / x.norm())
    parts = {"a constant branch": constant < 0.1, "a fast sine": ratio > slope / 10}
    numbers = {
        "constant branch: surrogate": constant,
        "constant branch: true": 0.0,
        "sin(10³x)/10³: surrogate": ratio,
        "sin(10³x)/10³: true": slope,
        "v2 surrogate of both": v2.transport_surrogate((constant, 1), (ratio, 1)),
    }
    return judged(parts, numbers)


@BAEK_V1.claim("residual relaxation, as reconstructed", kind="definition")
def residual_does_not_relax() -> Found:
    """y = x + f(x), f ≡ const: ρ = 0 promises no amplification.

    Claim: A small-gain residual (ρ < 1) multiplies relative error by (1+ρ)/(1-ρ).

    Instead: Absolute error obeys (1+ρ)e+δ; relative error needs ‖x‖/‖x+f(x)‖, measured.
    """
    x, f = 1.0, -1 + 1e-3
    moved = 1e-6
    relative = (moved / abs(x + f)) / (moved / abs(x))
    growth = {n: (1.1 / 0.9) ** n for n in (12, 48)}
    numbers = {
        "claimed factor at ρ = 0": 1.0,
        "measured factor": relative,
        "‖x‖/‖x + f(x)‖": abs(x / (x + f)),
        "(1+ρ)/(1-ρ) over 12 blocks, ρ = 0.1": growth[12],
        "over 48 blocks": growth[48],
    }
    ours = math.isclose(relative, abs(x / (x + f)))
    return judged({"at ρ = 0": relative <= 1.01}, numbers, instead=ours)


@BAEK_V1.claim("forward mismatch", kind="experiment")
def tf32_reference_understates() -> Found:
    """The error of an fp16 product against TF32 and against float64.

    Claim: A TF32-enabled fp32 run is the reference for fp16 mismatch.

    Instead: Reference in float64, or fp32 with TF32 switched off.
    """
    x, w = _normal(256, 256), _normal(256, 256, seed=1) / 16
    exact = x @ w
    tf32 = rounded(x, FORMATS["tf32"]) @ rounded(w, FORMATS["tf32"])
    half = rounded(rounded(x, HALF) @ rounded(w, HALF), HALF)
    numbers = {
        "fp16 against TF32": _relative(half, tf32),
        "fp16 against float64": _relative(half, exact),
        "TF32 against float64": _relative(tf32, exact),
    }
    low = numbers["fp16 against TF32"] < 0.9 * numbers["fp16 against float64"]
    return judged({"it shows the whole mismatch": not low}, numbers)
