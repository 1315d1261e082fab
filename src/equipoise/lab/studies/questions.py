"""What the papers left open, each as arms × seeds (theory 1 §6)."""

from dataclasses import replace

from equipoise.lab.models import GPTConfig
from equipoise.lab.models.config import Residual
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=6, heads=4, context=32)
DEEP = GPTConfig(width=64, depth=24, heads=4, context=64)
GRADIENTS = ("gradient_least_to_last", "gradient_spread")

BY_PART = (
    "validation",
    "loss",
    "spikes",
    "gradient_spikes",
    "steps_to_target",
    "early_gradient_qk",
    "early_gradient_vo",
    "early_gradient_feedforward",
    "early_gradient_embedding",
    "early_update_qk",
    "early_update_vo",
    "early_update_feedforward",
    "early_update_embedding",
)


def temperature(quick: bool) -> Experiment:
    """(a) Does temperature warm-up replace learning-rate warm-up?"""
    steps, warm = 100, 20
    base = TrainOptions(steps=steps, warmup=0, watch=False, parts_every=4)
    cool = {"tau_start": 8.0, "tau_steps": warm}
    warmups = {
        "none": base,
        "lr": replace(base, warmup=warm),
        "tau": replace(base, **cool),  # type: ignore[arg-type]
        "both": replace(base, warmup=warm, **cool),  # type: ignore[arg-type]
    }
    residuals: tuple[Residual, ...] = ("post",) if quick else ("post", "pre")
    arms = tuple(
        Arm(
            name=f"{residual}-{name}-{lr:g}",
            model=replace(SHAPE, residual=residual),
            train=replace(train, lr=lr),
        )
        for residual in residuals
        for lr in ((3e-3,) if quick else (1e-3, 3e-3, 1e-2))
        for name, train in warmups.items()
    )
    return Experiment(
        name="temperature",
        question="Does temperature warm-up replace learning-rate warm-up?",
        arms=arms,
        baselines={
            arm.name: f"{arm.model.residual}-none-{arm.train.lr:g}" for arm in arms
        },
        curves=("loss", "gradient/qk"),
        measures=BY_PART,
    )


def rmsnorm(quick: bool) -> Experiment:
    """(c) Does RMSNorm change the picture?"""
    train = TrainOptions(steps=40 if quick else 60, warmup=10, every=20, lr=2e-3)
    arms = tuple(
        Arm(
            name=f"{residual}-{norm}",
            model=replace(DEEP, depth=16, residual=residual, norm=norm),
            train=train,
        )
        for residual in ("pre", "post")
        for norm in ("layernorm", "rmsnorm")
    )
    return Experiment(
        name="rmsnorm",
        question="Does RMSNorm vanish, carry and train as LayerNorm does?",
        arms=arms,
        baselines={a.name: f"{a.model.residual}-layernorm" for a in arms},
        curves=("loss", "gradient.norm"),
        measures=(
            "validation",
            "loss",
            *GRADIENTS,
            "S_residual",
            "theta_p5",
            "token_cosine",
        ),
    )


def experts(quick: bool) -> Experiment:
    """(d) Does a mixture of experts change stability?"""
    train = TrainOptions(steps=40 if quick else 60, warmup=10, every=20, lr=2e-3)
    arms = tuple(
        Arm(
            name=f"{residual}-{count or 'dense'}",
            model=replace(SHAPE, residual=residual, experts=count, ffn_width=128),
            train=train,
        )
        for residual in ("pre", "post")
        for count in ((0, 4) if quick else (0, 4, 8))
    )
    return Experiment(
        name="experts",
        question="Does a mixture of experts change who trains?",
        arms=arms,
        baselines={a.name: f"{a.model.residual}-dense" for a in arms},
        curves=("loss", "gradient.norm"),
        measures=("validation", "loss", "spikes", *GRADIENTS, "S_residual", "theta_p5"),
    )


def sharpening(quick: bool) -> Experiment:
    """(e) Does θ stay at 1 as training goes on, and where not?"""
    shape = GPTConfig(width=64, depth=4, heads=4, context=64)
    steps = 100 if quick else 800
    train = TrainOptions(steps=steps, warmup=steps // 10, every=steps // 10, batch=4)
    arms = tuple(
        Arm(
            name=f"lr {lr:g}",
            model=shape,
            train=replace(train, lr=lr, preset="minimal"),
            judges=("positions",),
        )
        for lr in (1e-3, 4e-3)
    )
    return Experiment(
        name="sharpening",
        question="Does θ stay at 1 as training goes on, and where not?",
        arms=arms,
        curves=("attention.theta.p5", "attention.entropy", "queries/theta"),
        measures=(
            "theta_p5",
            "theta_p5_start",
            "theta_p50",
            "theta_least",
            "entropy",
            "entropy_start",
            "theta_early",
            "theta_late",
            "sharp_rows",
            "validation",
        ),
    )


def vanishing(quick: bool) -> Experiment:
    """(f) What does the gradient vanish from in post-LN?"""
    train = TrainOptions(
        steps=30 if quick else 60, warmup=10, every=5, parts_every=5, lr=1e-3
    )
    arms = tuple(
        Arm(name=name, model=replace(DEEP, residual=name), train=train)
        for name in ("pre", "post")
    )
    return Experiment(
        name="vanishing",
        question="What does the post-LN gradient vanish from?",
        arms=arms,
        curves=(
            "gradient.norm",
            "backward.norm_factor",
            "backward.branch_factor",
            "residual.token_cosine",
            "gradient/qk",
        ),
        measures=(
            "gradient_least_to_last",
            "gradient_least_to_last_start",
            "ln_norm_factors_start",
            "ln_branch_factors_start",
            "ln_norm_factors",
            "ln_branch_factors",
            "token_cosine_start",
            "token_cosine",
            "first_qk_start",
            "first_qk",
            "validation",
        ),
    )
