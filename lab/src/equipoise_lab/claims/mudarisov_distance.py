"""Mudarisov et al. (2025), §3.1: how far the chosen tokens' sum is from the rest."""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.numerics.selection import (
    SelectedTokens,
    chosen,
    critical_top,
    distance,
    distance_of,
    ks_power,
    ks_threshold,
    published_bound,
    ranked_at_random,
    weighted_tokens,
)
from equipoise_lab.claims.result import MUDARISOV, Found, judged


@MUDARISOV.claim("Theorem 1 (1), as reconstructed", kind="theorem")
def theorem_1() -> Found:
    """The bound with a root, with its bracket, and with a set that is not the top N.

    Claim: For the N largest weights, d̃ ≤ (1−ᾱ)d₁ + max‖x_j‖·[ᾱ(L−N) − (1−ᾱ)].

    Rule: It holds if none of 4000 top sets exceeds it; with a caveat if other sets of
    the same size do.

    Instead: True of the N largest weights only; for any set the bracket is Σ_{i∉I}|ᾱ −
    α_i|. The root over it in one printed review is a misreading. Tighter: Σ_{i∉I}
    α_i‖x_i − c‖ + ‖c‖Σ_{i∉I}|ᾱ − α_i|, c = s/ᾱ.
    """
    rng = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4000, 1, 12, generator=rng, dtype=torch.float64)
    x = torch.randn(4000, 12, 4, generator=rng, dtype=torch.float64)
    top = chosen(weighted_tokens(z.softmax(-1), x), 4)
    loose = chosen(ranked_at_random(top.given, rng), 4)
    true, anywhere = distance_of(top), distance_of(loose)
    evidence = {
        "violated with a root, of 4000": _count(true.value > _printed(top, power=0.5)),
        "violated with the bracket": _count(true.value > _printed(top)),
        "violated by random sets": _count(anywhere.value > _printed(loose)),
        "the same, sum written out": _count(anywhere.value > published_bound(loose)),
        "median bound/true": float((_printed(top) / true.value).median()),
        "median bound/true, ours": float((true.upper / true.value).median()),
        **_third_token(),
    }
    parts = {"the N largest": evidence["violated with the bracket"] == 0}
    return judged(parts, evidence, caveat=evidence["violated by random sets"] > 0)


@MUDARISOV.claim("§3.1, after Theorem 1", kind="theorem")
def vanishing_distance() -> Found:
    """d̃ at N = L/2 over L, for identical tokens and for tokens on a sphere.

    Claim: Selecting a constant fraction of the context drives d̃ to 0.

    Instead: Only N → L at fixed L does. Identical tokens have d̃ = L/4 − ½ at N = L/2,
    isotropic ones (1−c)√(cL) at N = cL. Report d̃/(L−N), and the lift d̃/E[d̃] over
    random sets.
    """
    evidence = {}
    for L in (16, 64, 256, 1024):
        same = chosen(weighted_tokens(_flat(L), torch.ones(L, 1)), L // 2)
        evidence[f"identical tokens, L = {L}"] = distance_of(same).value.item()
        evidence[f"their bound, L = {L}"] = published_bound(same).item()
        isotropic = weighted_tokens(_flat(L), _sphere(L, 256))
        evidence[f"on a sphere, L = {L}"] = distance(isotropic, L // 2).value.item()
    ends = weighted_tokens(_flat(1024), torch.ones(1024, 1))
    for N in (64, 512, 960, 1023):
        evidence[f"identical tokens, L = 1024, N = {N}"] = distance(
            ends, N
        ).value.item()
    kinds = ("identical tokens", "on a sphere")
    falls = [evidence[f"{k}, L = 1024"] < evidence[f"{k}, L = 16"] for k in kinds]
    return judged({"d̃ falls in L at N = L/2": all(falls)}, evidence)


@MUDARISOV.claim("Corollary 2 (i), as reconstructed", kind="corollary")
def corollary_2() -> Found:
    """E[d̃] at N = 5, L = 512 and flat weights, orthonormal and identical tokens.

    Claim: At fixed N, E[d̃] → Σ‖α_i x_i‖ as L grows; ε is small for flat weights.

    Instead: (n−N)/n·Σm_i ≤ E[d̃] ≤ (n−N)/n·Σ√(m_i² + V_i). The gap is a factor √(N+1)
    exactly when weights are flat and tokens orthogonal.
    """
    L, N = 512, 5
    evidence = {"claimed limit": 1.0}
    kinds = {"orthonormal": torch.eye(L), "identical": torch.ones(L, 1)}
    for name, x in kinds.items():
        # Flat weights and exchangeable tokens: every set of N has the same d̃.
        found = distance(weighted_tokens(_flat(L), x), N)
        evidence[f"E[d̃], {name}"] = found.value.item()
        evidence[f"main term, {name}"] = found.expected_lower.item()
        evidence[f"our upper bound, {name}"] = found.expected_upper.item()
    evidence["√(N+1)"] = math.sqrt(N + 1)
    parts = {
        "near the claimed limit at L = 512": all(
            evidence[f"E[d̃], {name}"] < 1.2 for name in kinds
        )
    }
    ours = all(
        evidence[f"main term, {name}"] - 1e-9
        <= evidence[f"E[d̃], {name}"]
        <= evidence[f"our upper bound, {name}"] + 1e-9
        for name in kinds
    )
    return judged(parts, evidence, instead=ours)


@MUDARISOV.claim("Theorem 1 (2), as reconstructed", kind="theorem")
def random_sets() -> Found:
    """E[d̃] by enumerating every set, beside the main term and our two bounds.

    Claim: E[d̃] is ((L−N)/L)·Σ‖y_i − N/(L−1)·Σ_{j≠i} y_j‖ up to a small ε.

    Instead: ε ≥ 0, and it is not small where weights are flat; E[d̃] lies between the
    main term and ((L−N)/L)·Σ√(m_i² + V_i), V_i the variance of sampling without
    replacement. The paper's own bound on ε could not be read.
    """
    rng = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 1, 200, dtype=torch.float64)[:, None, None]
    z = scale * torch.randn(200, 1, 7, generator=rng, dtype=torch.float64)
    x = torch.randn(200, 7, 5, generator=rng, dtype=torch.float64)
    given = weighted_tokens(z.softmax(-1), x)
    outside, ratio = 0.0, 1.0
    for N in (2, 3, 5):
        exact = _enumerated(z.softmax(-1)[:, 0], x, N)
        found = distance(given, N)
        low, high = found.expected_lower[:, 0], found.expected_upper[:, 0]
        room = 1e-9 * exact
        outside += _count((exact < low - room) | (exact > high + room))
        ratio = max(ratio, float((exact / low).max()))
    numbers = {
        "rows, every set of each": 600.0,
        "rows outside our bounds": outside,
        "largest E[d̃] ÷ main term": ratio,
    }
    parts = {"ε is small, under a fifth": ratio < 1.2}
    return judged(parts, numbers, instead=outside == 0)


@MUDARISOV.claim("Corollary 2 (ii), as reconstructed", kind="corollary")
def all_tokens_chosen() -> Found:
    """E[d̃] over N up to L − 1, by enumerating every set of 7 tokens.

    Claim: At fixed L, E[d̃] → 0 as N → L.

    Instead: It is 0 at N = L, where no token is left to be far from. One token short of
    that it is still of the size of one distance: do not read it as a limit.
    """
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(50, 7, generator=rng, dtype=torch.float64).softmax(-1)
    x = torch.randn(50, 7, 5, generator=rng, dtype=torch.float64)
    means = {N: float(_enumerated(w, x, N).mean()) for N in range(1, 8)}
    share = means[6] / max(means.values())
    numbers = {
        "E[d̃] at N = 1": means[1],
        "largest E[d̃]": max(means.values()),
        "E[d̃] at N = L − 1": means[6],
        "E[d̃] at N = L": means[7],
    }
    return judged({"0 at N = L": means[7] == 0}, numbers, caveat=share > 0.05)


def _enumerated(w_BK: Tensor, x_BKD: Tensor, top: int) -> Tensor:
    """Return the mean of d̃ over all sets of ``top`` tokens, from the definition."""
    y = w_BK[..., None] * x_BKD
    total, sets = torch.zeros(len(y), dtype=y.dtype), 0
    for chosen_ones in itertools.combinations(range(y.shape[1]), top):
        rest = [i for i in range(y.shape[1]) if i not in chosen_ones]
        s = y[:, list(chosen_ones)].sum(1, keepdim=True)
        total = total + (s - y[:, rest]).norm(dim=-1).sum(-1)
        sets += 1
    return total / sets


@MUDARISOV.claim("Figure 2a", kind="experiment")
def linear_expectation() -> Found:
    """Our bound on E[d̃], and d̃ of the top 5, over L: a head with a sink of 0.6.

    Claim: The expectation over random sets grows linearly with L.

    Instead: E[d̃] ≤ (1−N/L)(N+1)Σα‖x‖: bounded in L at fixed N. Only the top-N distance
    grows linearly. Not reproducible from the stated definitions.
    """
    evidence = {}
    for L in (32, 128, 512, 1024):
        w = torch.full((1, L), 0.4 / (L - 1), dtype=torch.float64)
        w[0, 0] = 0.6
        found = distance(weighted_tokens(w, _sphere(L, 64)), 5)
        evidence[f"our bound on E[d̃], L = {L}"] = found.expected_upper.item()
        evidence[f"top 5, L = {L}"] = found.value.item()
    bounded = all(v < 6 for k, v in evidence.items() if k.startswith("our"))
    top = [evidence[f"top 5, L = {L}"] for L in (32, 1024)]
    parts = {"chance grows linearly": not bounded}
    return judged(parts, evidence, instead=top[1] > 10 * top[0])


@MUDARISOV.claim("ours, on Figure 2c: a law", kind="experiment")
def critical_fraction() -> Found:
    """The critical N of one population of heads, drawn 36, 144 and 576 times.

    Claim: That selection cannot be told from chance beyond N ≈ 0.06 L, as the paper
    reads of one model, is a property of attention and not of the test.

    Instead: Nothing derives the fraction. It is where a two-sample test of 144 against
    144 heads stops rejecting, and moves with the number of heads alone: state the shift
    the test can see, and read the lift.

    Practice: 0.06·L is no law: measure your own heads with `equipoise selection`.
    """
    rng = torch.Generator().manual_seed(0)
    sizes = list(range(10, 201, 10))
    evidence = {
        "D rejected at 0.01, 144 heads": ks_threshold(144, 0.01),
        "power at a shift of 0.3σ, 144 heads": ks_power(0.3, 144, generator=rng),
    }
    shift_T1 = torch.tensor([3 * math.exp(-N / 40) for N in sizes])[:, None]
    for heads in (36, 144, 576):
        chance, noise = torch.randn(2, len(sizes), heads, generator=rng)
        found = critical_top(shift_T1 + noise, chance, sizes, generator=rng)
        evidence[f"critical N with {heads} heads"] = float(found.top or math.inf)
        evidence[f"shift seen 4 times in 5, {heads} heads"] = found.detectable
    few, many = (evidence[f"critical N with {heads} heads"] for heads in (36, 576))
    return judged({"the number of heads does not move it": few >= many}, evidence)


def _third_token() -> dict[str, float]:
    """Return d̃ and the printed bound of the set that holds only the lightest token."""
    w = torch.tensor([[[0.9, 0.09, 0.01]]], dtype=torch.float64)
    given = weighted_tokens(w, torch.eye(3)[None])
    lightest = chosen(replace(given, rank_xQK=2 - given.rank_xQK), 1)
    return {
        "d̃ of the lightest of three": distance_of(lightest).value.item(),
        "its printed bound": _printed(lightest).item(),
    }


def _printed(picked: SelectedTokens, *, power: float = 1.0) -> Tensor:
    """Return the bound as printed for Σα = 1: one bracket, to the given power."""
    x_NKD, inside_N1K = picked.given.x_xKD, picked.inside_xQK
    pairs_NKK = inside_N1K.mT & picked.rest_xQK
    widest_N1 = (torch.cdist(x_NKD, x_NKD) * pairs_NKK).amax((-1, -2))[:, None]
    longest_N1 = (x_NKD.norm(dim=-1)[:, None] * inside_N1K).amax(-1)
    mass_N1, left = picked.mass_xQ, x_NKD.shape[1] - picked.top
    inner_N1 = mass_N1 * left - (1 - mass_N1)
    spread_N1 = longest_N1 * inner_N1.sign() * inner_N1.abs() ** power
    bound_N1: Tensor = (1 - mass_N1) * widest_N1 + spread_N1
    return bound_N1


def _count(broken: Tensor) -> float:
    return float(broken.sum())


def _flat(L: int) -> Tensor:
    return torch.full((1, L), 1 / L, dtype=torch.float64)


def _sphere(L: int, width: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    x_LD = torch.randn(L, width, generator=rng, dtype=torch.float64)
    return torch.nn.functional.normalize(x_LD, dim=-1)
