"""Where training stops working: the largest gain and the largest rate."""

from dataclasses import replace
from typing import get_args

from equipoise.lab.models import GPTConfig
from equipoise.lab.models.config import Attention
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions

SHAPE = GPTConfig(width=64, depth=4, heads=4, context=32)


def exponents(quick: bool) -> Experiment:
    """(b) How does the largest initial gain that trains fall with depth?

    Pre-LN, because the bound behind N^(-1/m) is (1 + c·gain^m)^N: an identity path.
    """
    depths = (6, 24) if quick else (6, 12, 24, 48, 96)
    gains = (1.0, 2.0, 4.0, 8.0)
    train = TrainOptions(steps=24, warmup=0, watch=False, batch=4, lr=2e-3)
    shape = GPTConfig(width=32, heads=2, context=32, ffn_width=32)
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
        measures=("validation", "loss", "first_gradient"),
    )


SHAPES = {
    "pre": SHAPE,
    "post": replace(SHAPE, residual="post"),
    "gain-half": replace(SHAPE, gain=0.5),
    "gain-2": replace(SHAPE, gain=2.0),
    "gain-3": replace(SHAPE, gain=3.0),
    "deep": replace(SHAPE, depth=12),
    "qk-norm": replace(SHAPE, qk_norm=True),
    "sandwich": replace(SHAPE, residual="sandwich"),
}
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
DECAYS = (1.0, 10.0, 30.0, 100.0)


def rates(quick: bool) -> Experiment:
    """(g) Can the largest stable learning rate be told from the start of a run?

    Per shape: a sweep of rates, one of weight decays, and two short runs at a small
    rate in which the candidates for a prediction are measured, at init and at step 50.
    """
    train = TrainOptions(steps=60, warmup=5, batch=4, watch=False, give_up=6.5)
    kept = ("pre", "post", "gain-2") if quick else tuple(SHAPES)
    tried, decays = (RATES[::2], DECAYS[::2]) if quick else (RATES, DECAYS)
    arms = []
    for name in kept:
        shape = SHAPES[name]
        arms += [
            Arm(name=f"{name}-lr{lr:g}", model=shape, train=replace(train, lr=lr))
            for lr in tried
        ]
        arms += [
            Arm(
                name=f"{name}-wd{decay:g}",
                model=shape,
                train=replace(train, lr=3e-3, weight_decay=decay),
            )
            for decay in decays
        ]
        arms += [_predictors(name, shape, steps) for steps in (1, 50)]
    return Experiment(
        name="rates",
        question="Can the largest stable learning rate be told from the start?",
        arms=tuple(arms),
        measures=(
            "validation",
            "S",
            "S_residual",
            "lipschitz",
            "sharpness",
        ),
    )


def _predictors(name: str, shape: GPTConfig, steps: int) -> Arm:
    train = TrainOptions(
        steps=steps, warmup=1, batch=4, preset="deep", every=10**6, at=(steps - 1,)
    )
    return Arm(
        name=f"{name}-at{steps}", model=shape, train=train, judges=("sharpness",)
    )
