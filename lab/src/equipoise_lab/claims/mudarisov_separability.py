"""Mudarisov et al. (2025), §3.2: whether chosen tokens can be told from the rest."""

import math

import torch
from torch import Tensor

from equipoise.numerics.selection import (
    WeightedTokens,
    chosen,
    published_sphere_recall,
    random_separability,
    separability,
    sphere_recall,
    weighted_tokens,
)
from equipoise_lab.claims.result import MUDARISOV, Found, judged

L = 1024


@MUDARISOV.claim("ours, on §3.2, Figure 3: a ceiling", kind="experiment")
def eighty_percent() -> Found:
    """N_s/N of equal weights: orthonormal tokens, and tokens on spheres of two widths.

    Claim: About 80 % is a ceiling of separability in every model, on a sphere too (the
    paper reads 70–85 % of one model).

    Instead: Dimension limits it: near N* ≈ d/(2 ln L) for flat weights recall leaves 1,
    and it falls towards 0 beyond. 70–85 % was one model's reading.
    """
    evidence = {}
    for N in (64, 512):
        basis = weighted_tokens(_flat(), torch.eye(L))
        evidence[f"orthonormal, N = {N}"] = separability(basis, N).recall.item()
    for d in (64, 768):
        isotropic = weighted_tokens(_flat().expand(4, 1, L), _sphere(4, L, d))
        for N in (4, 16, 64, 256):
            found = separability(isotropic, N).recall
            evidence[f"sphere, d = {d}, N = {N}"] = found.mean().item()
    return judged({"none is above 0.9": max(evidence.values()) <= 0.9}, evidence)


@MUDARISOV.claim("§3.2, guidelines", kind="recommendation")
def collapse_is_rewarded() -> Found:
    """N_s/N where all tokens are identical, beside random sets and the cosine version.

    Claim: N_s/N measures how well a head tells its tokens apart.

    Instead: With identical tokens D_i = |ᾱ − α_i|: recall reads the order of the
    weights. Report random sets of the same size and the cosine version beside.
    """
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(1, 256, generator=rng, dtype=torch.float64).softmax(-1)
    given = weighted_tokens(w, torch.ones(256, 8))
    evidence = {}
    for N in (4, 16, 64):
        evidence[f"recall, N = {N}"] = separability(given, N).recall.item()
        random = random_separability(given, N, generator=rng)
        evidence[f"random sets, N = {N}"] = random.recall.item()
        cosine = separability(given, N, metric="cosine")
        evidence[f"cosine recall, N = {N}"] = cosine.recall.item()
    parts = {"low where nothing can be told apart": evidence["recall, N = 16"] < 0.5}
    return judged(parts, evidence)


@MUDARISOV.claim("Theorem 2, as reconstructed", kind="theorem")
def theorem_2() -> Found:
    """Recall beside the exponential bound, with a clamp and without, and beside ours.

    Claim: E[N_s]/N ≤ Σexp(−(ξ_i−r)²/(2M²))/N.

    Instead: ξ_i over-estimates E X_i, the wrong side for an upper tail. With σ_i² =
    Σα_j²: P(X_i ≤ r) ≥ 1 − 2/(d(r²/σ_i²−1)²) above σ_i and ≤ 2/(d(1−r²/σ_i²)²) below.
    """
    w = torch.tensor([0.2] * 4 + [0.02] * 10, dtype=torch.float64)
    picked = chosen(weighted_tokens(w[None], torch.eye(14)), 4)
    r = float((picked.distance_xQK.masked_fill(~picked.rest_xQK, math.inf)).min())
    evidence = {
        "orthonormal, recall": separability(picked.given, 4).recall.item(),
        "orthonormal, bound": published_sphere_recall(
            w[:4], r, gap=2**0.5
        ).upper.item(),
        **_sixteen(8, 0.35),
        **_sixteen(64, 0.30),
        "the bound never falls below": math.exp(-0.5),
    }
    parts = {
        "unclamped": evidence["orthonormal, recall"] <= evidence["orthonormal, bound"],
        "clamped": evidence["d = 8, recall"] <= evidence["d = 8, clamped bound"],
    }
    ours = all(
        evidence[f"d = {d}, ours from below"] - 0.01
        <= evidence[f"d = {d}, recall"]
        <= evidence[f"d = {d}, ours from above"] + 0.01
        for d in (8, 64)
    )
    return judged(parts, evidence, instead=ours)


@MUDARISOV.claim("§3.2, Eq. (10)", kind="definition")
def closed_ball() -> Found:
    """Share of rows with an outsider in the ball, closed and open; recall of one token.

    Claim: A chosen token is distinguishable if it lies in the closed ball of radius r =
    min_{i∉I}‖s − α_i x_i‖ and no other token does.

    Instead: D_i < r, strictly, as the follow-up has it. N = 1 is always separable, for
    a random token too: start at N = 2.
    """
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(200, 1, 32, generator=rng, dtype=torch.float64).softmax(-1)
    picked = chosen(weighted_tokens(w, _sphere(200, 32, 8)), 4)
    D, rest = picked.distance_xQK, picked.rest_xQK
    r = D.masked_fill(~rest, math.inf).amin(-1, keepdim=True)
    one = random_separability(picked.given, 1, generator=rng)
    evidence = {
        "rows with an outsider in the closed ball": _share((rest & (D <= r)).any(-1)),
        "rows with one in the open ball": _share((rest & (D < r)).any(-1)),
        "recall of one token": separability(picked.given, 1).recall.mean().item(),
        "recall of one random token": one.recall.mean().item(),
    }
    parts = {
        "it can be met": evidence["rows with an outsider in the closed ball"] < 1,
    }
    strict = evidence["rows with one in the open ball"] == 0
    return judged(parts, evidence, instead=strict)


@MUDARISOV.claim("Guidelines; the authors' follow-up", kind="recommendation")
def functional_relevance() -> Found:
    """N_s/N of two heads, and the error of each if only its chosen tokens are kept.

    Claim: A head with a higher N_s/N selects better.

    Instead: Dropping the rest costs ‖(1−M)μ_T‖, renormalised ‖(1−M)(μ_T−μ_S)‖, M the
    kept mass and μ the weighted means inside and outside: it matters what the rest
    says, not how far away it is. The follow-up finds the same in NLL.

    Practice: N_s/N is not a score of quality.
    """
    apart = weighted_tokens(_falling(), torch.eye(64))
    near = torch.ones(64, 8, dtype=torch.float64) + 0.01 * _sphere(1, 64, 8, seed=3)[0]
    alike = weighted_tokens(_flat(64), near)
    evidence = {}
    for name, given in (("apart", apart), ("alike", alike)):
        errors = _kept(given, 8)
        evidence[f"recall, {name}"] = separability(given, 8).recall.item()
        evidence[f"error if the rest is dropped, {name}"] = errors[0]
        evidence[f"and weights renormalised, {name}"] = errors[1]
        evidence[f"identities off by, {name}"] = errors[2]
    better = evidence["recall, apart"] > evidence["recall, alike"]
    worse = (
        evidence["and weights renormalised, apart"]
        > evidence["and weights renormalised, alike"]
    )
    parts = {"the better separated loses less, renormalised": not (better and worse)}
    return judged(parts, evidence)


def _sixteen(width: int, r: float) -> dict[str, float]:
    """Return simulated recall of 16 equal weights, and both bounds."""
    w = torch.full((16,), 0.9 / 16, dtype=torch.float64)
    x = _sphere(4000, 16, width)
    y = w[:, None] * x
    inside = (y.sum(1, keepdim=True) - y).norm(dim=-1) <= r
    off = torch.eye(16, dtype=torch.bool)
    gap = torch.cdist(x, x).masked_fill(off, math.inf).min().item()
    theirs = published_sphere_recall(w, r, gap=gap, clamped=True).upper.item()
    ours = sphere_recall(w, r, width=width)
    return {
        f"d = {width}, recall": inside.double().mean().item(),
        f"d = {width}, clamped bound": theirs,
        f"d = {width}, ours from above": ours.upper.item(),
        f"d = {width}, ours from below": ours.lower.item(),
    }


def _kept(given: WeightedTokens, top: int) -> tuple[float, float, float]:
    """Return the output's error without the rest, renormalised, and the identities'."""
    picked = chosen(given, top)
    mass, out, s = picked.mass_xQ[0], given.output_xQD[0], picked.context_xQD[0]
    inside, outside = s / mass, (out - s) / (1 - mass)
    dropped, renormalised = out - s, out - s / mass
    off = (dropped - (1 - mass) * outside).norm()
    off = off + (renormalised - (1 - mass) * (outside - inside)).norm()
    return dropped.norm().item(), renormalised.norm().item(), off.item()


def _share(rows: Tensor) -> float:
    return float(rows.double().mean())


def _flat(keys: int = L) -> Tensor:
    return torch.full((1, keys), 1 / keys, dtype=torch.float64)


def _falling() -> Tensor:
    return torch.linspace(1, 0, 64, dtype=torch.float64).softmax(-1)[None]


def _sphere(rows: int, keys: int, width: int, *, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, keys, width, generator=rng, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)
