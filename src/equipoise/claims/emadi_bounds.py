"""Emadi (2026), §5: what the layer bounds claim, and where a number says otherwise."""

import torch
from torch import Tensor

from equipoise.claims.verdict import EMADI, Found
from equipoise.numerics.rows.balance import balance
from equipoise.theory.activations import activation_named
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.heads import Heads
from equipoise.theory.lipschitz.joint import dual_rows
from equipoise.theory.lipschitz.published import emadi_ball, emadi_local


@EMADI.claim("§5, L_FFN")
def activation_constant() -> Found:
    """The feed-forward bound ‖W₂‖‖W₁‖ takes activations to be 1-Lipschitz.

    Claim: A feed-forward net with GELU changes by at most ‖W₂‖‖W₁‖ per unit.

    Instead: L_FFN ≤ ‖W₂‖‖W₁‖·max|φ'|: 1.1290 for GELU, 1.0999 for SiLU, 1 for ReLU, and
    none for gated nets without a bound on their input.
    """
    function, steepest = activation_named("gelu")
    x, y = torch.tensor([1.40, 1.43], dtype=torch.float64)
    ratio = float((function(y) - function(x)) / (y - x))
    return "fails" if ratio > 1 else "holds", {
        "claimed for W1 = W2 = 1": 1.0,
        "measured between 1.40 and 1.43": ratio,
        "constant of GELU": steepest,
        "constant of SiLU": activation_named("silu")[1],
    }


@EMADI.claim("Thm 5.1")
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
    return "corrected" if bound < moved <= ball else "holds", {
        "theta at x": float(balance(attend(heads, x).p_HQK).upper.max()),
        "bound with theta at x": bound,
        "change of output per change of input": float(moved),
        "bound with theta 1": ball,
    }


@EMADI.claim("Thm 5.1")
def biases_are_not_in_the_magnitude() -> Found:
    """Thm 5.1 on a layer with a query bias, as GPT-2's has: B̄ does not see it.

    Claim: The input magnitude B̄ bounds what reaches the scores.

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
    return "corrected" if literal < truth <= repaired else "holds", {
        "bound with B of the input": literal,
        "local constant": truth,
        "bound with tokens (x, 1)": repaired,
    }


def _one_channel(*, sharpness: float) -> Heads:
    """Return one head of width one: scores sharpness·x_i x_j, values x_j."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    return Heads(w_q_HDE=sharpness * one, w_k_GDE=one, w_v_GDF=one, w_o_HFD=one)


def _output(heads: Heads, x_KD: Tensor) -> Tensor:
    return (attend(heads, x_KD).o_HQF @ heads.w_o_HFD).sum(0)
