"""What the papers left open, each as arms × seeds (theory 1 §6)."""

from dataclasses import replace
from typing import get_args

from equipoise.lab.experiment import Arm, Experiment
from equipoise.lab.models import GPTConfig
from equipoise.lab.models.config import Attention
from equipoise.lab.training import TrainOptions

SHAPE = GPTConfig(width=64, depth=12, heads=4, context=64)
GRADIENTS = ("gradient_least_to_last", "gradient_spread")
UPDATES = ("update_attention", "update_feedforward", "update_embedding")


def temperature(quick: bool) -> Experiment:
    """(a) Does temperature warm-up replace learning-rate warm-up?"""
    steps = 100 if quick else 300
    base = TrainOptions(steps=steps, warmup=0)
    warmups = {
        "none": {},
        "lr": {"warmup": steps // 5},
        "tau": {"tau_start": 8.0, "tau_steps": steps // 5},
        "both": {"warmup": steps // 5, "tau_start": 8.0, "tau_steps": steps // 5},
    }
    rates = (3e-3,) if quick else (1e-3, 3e-3, 1e-2)
    arms = tuple(
        Arm(
            name=f"{name}-{lr:g}",
            model=replace(SHAPE, residual="post"),
            train=replace(base, lr=lr, **changes),  # type: ignore[arg-type]
        )
        for lr in rates
        for name, changes in warmups.items()
    )
    return Experiment(
        name="temperature",
        question="Does temperature warm-up replace learning-rate warm-up?",
        arms=arms,
        measures=("validation", "loss", "spikes", "gradient_spikes", *UPDATES),
    )


def exponents(quick: bool) -> Experiment:
    """(b) How does the largest initial gain that trains fall with depth?"""
    depths = (6, 24) if quick else (6, 12, 24, 48, 96)
    gains = (0.5, 2.0, 8.0) if quick else (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    train = TrainOptions(steps=40 if quick else 80, warmup=0, watch=False, batch=4)
    shape = replace(SHAPE, width=32, context=32, residual="post")
    arms = tuple(
        Arm(
            name=f"{kind}-N{depth}-g{gain:g}",
            model=replace(shape, attention=kind, depth=depth, gain=gain),
            train=train,
        )
        for kind in get_args(Attention)
        for depth in depths
        for gain in gains
    )
    return Experiment(
        name="exponents",
        question="Does the largest gain that trains fall like N^(-1/m)?",
        arms=arms,
        seeds=(42, 123) if quick else (42, 123, 456),
        measures=("validation", "loss", "spikes"),
    )


def rmsnorm(quick: bool) -> Experiment:
    """(c) Does RMSNorm change the picture?"""
    train = TrainOptions(steps=100 if quick else 300, warmup=20)
    arms = tuple(
        Arm(
            name=f"{residual}-{norm}",
            model=replace(SHAPE, depth=24, residual=residual, norm=norm),
            train=train,
        )
        for residual in ("pre", "post")
        for norm in ("layernorm", "rmsnorm")
    )
    return Experiment(
        name="rmsnorm",
        question="Does RMSNorm vanish, carry and train as LayerNorm does?",
        arms=arms,
        measures=("validation", "loss", *GRADIENTS, "S_residual", "theta_p5"),
    )


def experts(quick: bool) -> Experiment:
    """(d) Does a mixture of experts change stability?"""
    train = TrainOptions(steps=100 if quick else 300, warmup=20)
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
        measures=("validation", "loss", "spikes", *GRADIENTS, "S_residual"),
    )


def sharpening(quick: bool) -> Experiment:
    """(e) Does θ stay at 1 as training goes on, and where not?"""
    shape = GPTConfig(width=64, depth=4, heads=4, context=64)
    lengths = (100, 400) if quick else (300, 1000, 3000)
    arms = tuple(
        Arm(
            name=f"{steps} steps",
            model=shape,
            train=TrainOptions(steps=steps, warmup=steps // 10, lr=3e-3, every=20),
        )
        for steps in lengths
    )
    return Experiment(
        name="sharpening",
        question="Does θ stay at 1 as training goes on?",
        arms=arms,
        measures=("theta_p5", "theta_p50", "theta_least", "entropy", "validation"),
    )


def vanishing(quick: bool) -> Experiment:
    """(f) What does the gradient vanish from in post-LN?"""
    train = TrainOptions(steps=50 if quick else 150, warmup=10, every=5)
    shape = replace(SHAPE, depth=24 if quick else 36)
    arms = tuple(
        Arm(name=name, model=replace(shape, residual=name), train=train)
        for name in ("pre", "post")
    )
    return Experiment(
        name="vanishing",
        question="What does the post-LN gradient vanish from?",
        arms=arms,
        measures=(
            "gradient_least_to_last",
            "norm_factor",
            "branch_factor",
            "norm_factor_start",
            "branch_factor_start",
            "token_cosine",
            "token_cosine_start",
            "validation",
        ),
    )


def rates(quick: bool) -> Experiment:
    """(g) Can the largest stable learning rate be told from the start of a run?"""
    tried = (1e-3, 1e-2, 1e-1) if quick else (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    shapes = {
        "pre": replace(SHAPE, depth=6),
        "post": replace(SHAPE, depth=6, residual="post"),
        "pre-gain2": replace(SHAPE, depth=6, gain=2.0),
        "pre-deep": replace(SHAPE, depth=24),
        "pre-qknorm": replace(SHAPE, depth=6, qk_norm=True),
        "sandwich": replace(SHAPE, depth=6, residual="sandwich"),
    }
    train = TrainOptions(steps=60 if quick else 120, warmup=10, batch=4)
    kept = ("pre", "post", "pre-gain2") if quick else tuple(shapes)
    arms = tuple(
        Arm(name=f"{name}-lr{lr:g}", model=shapes[name], train=replace(train, lr=lr))
        for name in kept
        for lr in tried
    )
    return Experiment(
        name="rates",
        question="Does S at the start predict the largest learning rate that trains?",
        arms=arms,
        measures=("validation", "loss", "spikes", "S_start", "S_residual_start"),
    )
