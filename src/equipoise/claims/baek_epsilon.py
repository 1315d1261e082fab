"""Baek (2025) v1 Exp. 3 and v2 BGSS: how much ε can do, by their own rules."""

from equipoise.claims.verdict import Verdict
from equipoise.numerics.formats import FORMATS
from equipoise.remedies.bgss import Bgss
from equipoise.remedies.epsilon import NormState, noise_rule, published_rule

HALF = FORMATS["fp16"]


def intervention_never_fires() -> Verdict:
    """The trigger ρ_LN < 1 at D = 128 in fp16, over token variances of real norms."""

    def fired(variance: float) -> float:
        state = NormState(variance=variance, power=variance, width=128, eps=1e-5)
        return published_rule(state, HALF) / 1e-5

    variances = [10.0**e for e in range(-8, 3)]
    growth = {v: fired(v) for v in variances}
    usual = max(growth[v] for v in variances if v >= 1e-2)
    finest = max(fired(10 ** (-8 + 4.2 * i / 400)) for i in range(400))
    noisy = NormState(variance=1e-6, power=1.0, width=128, eps=1e-5)
    return Verdict(
        paper="baek2025",
        where="Exp. 3",
        claim="Raising ε when ρ_LN < 1 improves the tail loss by about 0.010.",
        outcome="fails" if usual == 1.0 else "holds",
        evidence={
            "largest σ² at which it can fire": 1e-5 / (128 * HALF.spacing),
            "largest change of ε for σ² ≥ 0.01": usual,
            "largest change of ε for any σ²": finest,
            "the cap, as a change of ε": 1e-2 / 1e-5,
            "noise rule, mean 1 and σ² = 1e-6": noise_rule(noisy, HALF) / 1e-5,
        },
        instead="Pre-norm activations have σ² near 1: the rule is a no-op there, and "
        "both arms of the experiment are the same network from different seeds.",
    )


def bgss_moves_little() -> Verdict:
    """All six allowed actions on one layer, and what that changes at σ² = 1."""
    controller = Bgss(layers=1)
    for step in range(400):
        controller.step(step, total_risk=1.0, scores=[1.0])
    eps = controller.eps[0]
    change = 0.5 * (eps - 1e-5) / (1 + eps)
    return Verdict(
        paper="baek2026",
        where="BGSS",
        claim="Raising ε of risky layers cuts the worst mismatch by 63 %.",
        outcome="not computable",
        evidence={
            "actions": float(controller.actions[0]),
            "final ε": eps,
            "relative change of the norm's output at σ² = 1": change,
        },
        instead="The budget moves a norm of unit variance by under 0.1 %. The effect "
        "needs ≥ 10 paired seeds, a do-nothing arm, and the same windows in each arm.",
    )
