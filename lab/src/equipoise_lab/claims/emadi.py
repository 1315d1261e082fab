"""Emadi (2026): what is claimed of θ (§4, Fig. 3, App. E.2) and of layer bounds (§5).

Axes, in this file:  N row · K key · S sign vector.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.numerics.attention_sensitivity import sensitivity
from equipoise.numerics.rows.balance import balance
from equipoise.numerics.rows.finite_step import finite_step
from equipoise.theory.activations import activation_named
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.claims.result import EMADI, Found, judged
from equipoise_lab.results.evidence import Evidence, rounded, surroundings
from equipoise_lab.results.statistics import Runs
from equipoise_lab.running.experiment import FIVE_SEEDS
from equipoise_lab.theory.lipschitz.joint import dual_rows
from equipoise_lab.theory.lipschitz.published import emadi_ball, emadi_local

_TRIALS = 500
_LENGTHS = (4, 8, 12, 16)


def sorted_prefix(p_xK: Tensor) -> Tensor:
    """Return the paper's heuristic: the best 4 p(S)(1 - p(S)) over sorted prefixes."""
    mass = p_xK.sort(-1, descending=True).values.cumsum(-1)
    return (4 * mass * (1 - mass)).amax(-1)


@EMADI.claim("Cor. 4.3(3)", kind="corollary")
def peaked_bound() -> Found:
    """Cor. 4.3(3): a bound for peaked rows, stated for every κ.

    Claim: A row whose top key holds 1 - κ has θ ≤ 4κ(1 - κ).

    Rule: Two parts, because the corollary is stated for every κ: rows with κ ≤ ½, and
    rows with κ > ½ (uniform over 10 keys).

    Instead: For κ ≤ ½ it is an equality, attained by S = {top}: θ = 4κ(1 - κ). For κ >
    ½ it is false, and nothing of the kind holds.
    """
    uniform = torch.full((10,), 0.1, dtype=torch.float64)
    kappa = 1 - float(uniform.max())
    peaked = peaked_rows()
    top = peaked.amax(-1)
    theta, uniform_theta = balance(peaked), float(balance(uniform).lower)
    off = float((theta.lower - 4 * top * (1 - top)).abs().max())
    parts = {"κ ≤ ½": off < 1e-12, "κ > ½": uniform_theta <= 4 * kappa * (1 - kappa)}
    return judged(
        parts,
        {
            "kappa, uniform over 10 keys": kappa,
            "claimed bound": 4 * kappa * (1 - kappa),
            "theta": uniform_theta,
            "largest |theta - 4κ(1-κ)| for κ ≤ ½": off,
        },
    )


def peaked_rows() -> Tensor:
    """Return random rows whose largest key holds between ½ and 1 of the mass."""
    rng = torch.Generator().manual_seed(0)
    rest = torch.rand(200, 15, generator=rng, dtype=torch.float64)
    top = 0.5 + 0.5 * torch.rand(200, 1, generator=rng, dtype=torch.float64)
    return torch.cat([top, rest / rest.sum(-1, keepdim=True) * (1 - top)], -1)


@EMADI.claim("App. E.2", kind="heuristic")
def greedy_prefix() -> Found:
    """App. E.2: the heuristic on the paper's own protocol, N(0, I) scores and τ = 1.

    Claim: The sorted-prefix heuristic equals exhaustive search for L ≤ 16.

    Instead: Sorted prefixes give a lower bound only. Use equipoise.balance: its
    interval is exact at these lengths, and faster.

    Practice: Sorted prefixes do not give θ; use `equipoise.balance`.
    """
    rng = torch.Generator().manual_seed(0)
    wrong, worst = {}, 0.0
    for length in _LENGTHS:
        z = torch.randn(_TRIALS, length, generator=rng, dtype=torch.float64)
        p = z.softmax(-1)
        short = 1 - sorted_prefix(p) / balance(p).lower
        wrong[f"share of rows missed, L = {length}"] = float(
            (short > 1e-12).double().mean()
        )
        worst = max(worst, float(short.max()))
    parts = {"no row is missed": max(wrong.values()) == 0}
    return judged(parts, {**wrong, "largest relative error": worst})


@EMADI.claim("§4, example (.4, .1, .4, .1)", kind="definition")
def example_row() -> Found:
    """θ and entropy of the paper's example row, beside the uniform row.

    Claim: p = (.4, .1, .4, .1) has a lower entropy than the uniform row and θ = 1.

    Rule: Two parts: the entropy is lower; θ is 1 to rounding.

    Instead: As stated: one large and one small key on each side. The sorted prefixes
    of App. E.2 read 0.96 on this row (see ``greedy_prefix``).
    """
    p = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float64)
    theta, prefix = float(balance(p).lower), float(sorted_prefix(p))
    entropy = float(-(p * p.log()).sum())
    parts = {
        "lower entropy": entropy < math.log(4) - 1e-9,
        "θ = 1": abs(theta - 1) < 1e-12,
    }
    numbers = {"theta": theta, "entropy": entropy, "sorted prefix": prefix}
    return judged(parts, numbers)


@EMADI.claim("ours, on §7: θ of every row", kind="experiment")
def one_throughout() -> Found:
    """The largest θ over heads of the first queries of random causal attention.

    Claim: In causal language models θ/τ is 1.000 in every row of a whole run.

    Rule: One row below 1 in every model refutes "every": the first query's.

    Instead: Query 0 sees one key, so θ = 0; query 1 has θ = 4p(1 - p); a row with a
    sink of mass s ≥ ½ has 4s(1 - s). Report quantiles by head and position.
    """
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 64, 16, generator=rng, dtype=torch.float64).unbind(0)
    by_query = sensitivity(q, k, causal=True).upper.amax(0)
    numbers = {
        f"largest theta of query {at}, over heads": float(by_query[at])
        for at in (0, 1, 63)
    }
    return judged({"query 0 reads 1.000": float(by_query[0]) >= 0.9995}, numbers)


TEMPERATURES = (0.1, 1.0, 10.0)
LENGTHS = (4, 8, 12)
DRAWS = 200
MEASURES = ("norm", "theta_error", "heuristic_error", "heuristic_wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPoint:
    """Rows of one length and temperature."""

    keys: int
    tau: float
    norm: float
    """Mean of ‖J‖_{∞→1}, found by trying every sign vector."""
    theta_error: float
    """Largest |θ - τ·norm|: the theorem, with exact θ."""
    heuristic_error: float
    """The same with the paper's sorted-prefix heuristic in place of θ."""
    heuristic_wrong: float
    """Share of rows in which the heuristic is off by more than rounding."""


def figure3(seed: int = 42) -> list[ClaimPoint]:
    """Return a point per length and temperature; scores are N(0, 1), as in App. E.2."""
    rng = torch.Generator().manual_seed(seed)
    scores = {
        K: torch.randn(DRAWS, K, generator=rng, dtype=torch.float64) for K in LENGTHS
    }
    return [_point(z_NK, tau) for z_NK in scores.values() for tau in TEMPERATURES]


def theorem_evidence() -> Evidence:
    """Return the figure over five seeds, as the lab keeps its results."""
    start = time.process_time()
    runs: dict[str, Runs] = {}
    for seed in FIVE_SEEDS:
        for point in figure3(seed):
            arm = f"{point.keys} keys, τ = {point.tau:g}"
            runs.setdefault(arm, {})[seed] = {n: getattr(point, n) for n in MEASURES}
    return Evidence(
        name="theorem",
        question="Is ‖J‖ from ∞ to 1 of a softmax row exactly θ/τ?",
        measures=MEASURES,
        seeds=FIVE_SEEDS,
        arms={arm: {} for arm in runs},
        baselines={},
        runs=runs,
        about={
            **surroundings(),
            "command": "equipoise lab run theorem",
            "cpu_minutes": rounded((time.process_time() - start) / 60),
        },
        digits=None,
    )


def _point(z_NK: Tensor, tau: float) -> ClaimPoint:
    p_NK = (z_NK / tau).softmax(-1)
    norm_N = brute_force(z_NK, tau)
    ours_N, theirs_N = balance(p_NK).lower / tau, sorted_prefix(p_NK) / tau
    # Against the largest possible norm: a saturated row's own is lost to rounding.
    off_N = (theirs_N - norm_N).abs() * tau
    return ClaimPoint(
        keys=z_NK.shape[-1],
        tau=tau,
        norm=norm_N.mean().item(),
        theta_error=((ours_N - norm_N).abs() * tau).max().item(),
        heuristic_error=off_N.max().item(),
        heuristic_wrong=(off_N > 1e-9).double().mean().item(),
    )


def brute_force(z_NK: Tensor, tau: float) -> Tensor:
    """Return max over x = ±1 of ‖J x‖₁, with J from autograd: no formula of ours."""

    def row(z_K: Tensor) -> Tensor:
        return (z_K / tau).softmax(-1)

    J_NKK = torch.func.vmap(torch.func.jacrev(row))(z_NK)
    K = z_NK.shape[-1]
    bits_SK = (torch.arange(2**K)[:, None] >> torch.arange(K)) & 1
    sign_SK = (2 * bits_SK - 1).to(z_NK.dtype)
    norm_N: Tensor = torch.stack([(sign_SK @ J.T).abs().sum(-1).max() for J in J_NKK])
    return norm_N


@EMADI.claim("ours, on Thm 4.2: a finite step", kind="theorem")
def finite_steps_of_saturated_rows() -> Found:
    """The largest ‖softmax(u + Δ) − p‖₁ over all vertices ‖Δ‖∞ = r, over θ·r.

    Claim: θ(p)·r bounds how far a row moves when its logits move by r.

    Rule: One vertex beyond θ·r refutes it; what stands in its place, ``finite_step``,
    is checked against every vertex of 60 rows, 20 at each of three r.

    Instead: θ is the derivative. A finite step moves a row by at most 2 tanh(r/2), and
    by max_S 4m(1−m) sinh r/(m e^r + (1−m) e^−r), m = p(S), exactly: a row with θ = 4e-4
    moves by 1.375 at r = 5.

    Practice: A saturated row is not a safe one: read `attention.finite_step` beside θ.
    """
    rng = torch.Generator().manual_seed(0)
    beyond, off = 0.0, 0.0
    for radius in (0.1, 1.0, 5.0):
        sizes = torch.logspace(-1, 1, 20, dtype=torch.float64)[:, None]
        z_NK = sizes * torch.randn(20, 7, generator=rng, dtype=torch.float64)
        p_NK, truth_N = z_NK.softmax(-1), vertices(z_NK, radius)
        theta_N = balance(p_NK).upper
        beyond = max(beyond, float((truth_N / (theta_N * radius)).max()))
        found = finite_step(p_NK, radius=radius)
        ours = torch.stack([truth_N - found.upper, found.lower - truth_N])
        off = max(off, float(ours.max()))
    return judged(
        {"θ·r": beyond <= 1 + 1e-9},
        instead=off < 1e-9,
        numbers={
            "largest truth ÷ θ·r": beyond,
            "largest distance outside our interval": off,
        },
    )


def vertices(z_NK: Tensor, radius: float) -> Tensor:
    """Return the largest change over all sign vectors: no formula of ours."""
    K = z_NK.shape[-1]
    bits_SK = (torch.arange(2**K)[:, None] >> torch.arange(K)) & 1
    step_SK = radius * (2.0 * bits_SK.to(z_NK.dtype) - 1)
    q_NSK = (z_NK[:, None] + step_SK).softmax(-1)
    found: Tensor = (q_NSK - z_NK.softmax(-1)[:, None]).abs().sum(-1).amax(-1)
    return found


@EMADI.claim("App. C.2, L_FFN", kind="definition")
def activation_constant() -> Found:
    """The steepest slope of ReLU, and of the GELU that the paper's models have.

    Claim: With a 1-Lipschitz activation (e.g. ReLU) L_FFN ≤ ‖W₂‖‖W₁‖.

    Rule: It holds if no slope of ReLU exceeds 1; with a caveat if GELU's does, which
    GPT-2-style models have and the hypothesis leaves out.

    Instead: For other activations L_FFN ≤ ‖W₂‖‖W₁‖·max|φ'|: 1.1290 for GELU, 1.0999 for
    SiLU, 1 for ReLU, and none for gated nets without a bound on their input.
    """
    function, steepest = activation_named("gelu")
    x, y = torch.tensor([1.40, 1.43], dtype=torch.float64)
    ratio = float((function(y) - function(x)) / (y - x))
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    relu = float((z.relu().diff() / z.diff()).max())
    return judged(
        {"ReLU": relu <= 1 + 1e-9},
        caveat=ratio > 1,
        numbers={
            "claimed for W1 = W2 = 1": 1.0,
            "steepest of ReLU": relu,
            "measured between 1.40 and 1.43": ratio,
            "constant of GELU": steepest,
            "constant of SiLU": activation_named("silu")[1],
        },
    )


@EMADI.claim("Thm 5.1, as a Lipschitz constant", kind="theorem")
def measured_theta_is_local() -> Found:
    """Thm 5.1 with θ̃ read at one input, used as a Lipschitz constant.

    Three tokens (t, 1, −1) under sharp attention: each row is saturated, so θ̃ ≈ 0, and
    so it is at (−t, 1, −1), but on the way the first token changes its mind.

    Claim: With θ̃ measured on the data, L_MHA bounds every change of the output.

    Instead: With θ̃ and B̄ read at one input it bounds the derivative there. A
    Lipschitz constant needs θ̃ = 1 and a B̄ that no input exceeds.
    """
    heads = _one_channel(sharpness=200.0)
    x, y = (torch.tensor([[t], [1.0], [-1.0]]).double() for t in (0.1, -0.1))
    moved = (_output(heads, x) - _output(heads, y)).abs().max() / (x - y).abs().max()
    bound, ball = emadi_local(heads, x).value, emadi_ball(heads, radius=1.0).value
    numbers = {
        "theta at x": float(balance(attend(heads, x).p_HQK).upper.max()),
        "bound with theta at x": bound,
        "change of output per change of input": float(moved),
        "bound with theta 1": ball,
    }
    parts = {"no change exceeds it": float(moved) <= bound}
    return judged(parts, numbers, instead=float(moved) <= ball)


@EMADI.claim("ours, on Thm 5.1: projections with biases", kind="theorem")
def biases_are_not_in_the_magnitude() -> Found:
    """The local constant of a layer with a query bias, beside Thm 5.1 as printed.

    Claim: The bound of Theorem 5.1, which has no biases, also bounds layers that have
    them, as GPT-2's do.

    Instead: With biased projections apply the theorem to tokens (x, 1), the bias as one
    more row of each weight: B̄² grows by one.
    """
    heads = _one_channel(sharpness=1.0)
    biased = Heads(
        w_q_HDE=heads.w_q_HDE,
        w_k_GDE=heads.w_k_GDE,
        w_v_GDF=heads.w_v_GDF,
        w_o_HFD=heads.w_o_HFD,
        b_q_HE=torch.full((1, 1), 120.0, dtype=torch.float64),
    )
    x = torch.tensor([[0.01], [-0.01]]).double()
    theta = float(balance(attend(biased, x).p_HQK).upper.max())
    literal = 1 + theta * 2 * 0.01**2
    truth = float(dual_rows(attend(biased, x)).lower.max())
    repaired = emadi_local(biased, x).value
    numbers = {
        "bound with B of the input": literal,
        "local constant": truth,
        "bound with tokens (x, 1)": repaired,
    }
    parts = {"it bounds the local constant": truth <= literal}
    return judged(parts, numbers, instead=truth <= repaired)


def _one_channel(*, sharpness: float) -> Heads:
    """Return one head of width one: scores sharpness·x_i x_j, values x_j."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    return Heads(w_q_HDE=sharpness * one, w_k_GDE=one, w_v_GDF=one, w_o_HFD=one)


def _output(heads: Heads, x_KD: Tensor) -> Tensor:
    return (attend(heads, x_KD).o_HQF @ heads.w_o_HFD).sum(0)
