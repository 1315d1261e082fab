"""Remedies by name, as verdicts and ``equipoise remedies`` name them."""

import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from equipoise.errors import InputError
from equipoise.remedies.base import Remedy
from equipoise.remedies.epsilon import LayerNormEpsilon
from equipoise.remedies.gradients import (
    AdaptiveClip,
    GradientClip,
    SkipStep,
    SpikeHandling,
    UpdateClip,
)
from equipoise.remedies.losses import RouterBalance, ZLoss
from equipoise.remedies.normaliser import NormaliserSwap
from equipoise.remedies.optimiser import (
    Beta2,
    GroupLearningRates,
    LearningRate,
    OptimizerReset,
)
from equipoise.remedies.precision import KeepFp32
from equipoise.remedies.qk_clip import QKClip
from equipoise.remedies.residual import DeepNormInit, PathInit, ResidualScale
from equipoise.remedies.roll_back import RollBack
from equipoise.remedies.scores import HeadTemperature, QKNorm, SoftCap
from equipoise.remedies.sigma_reparam import SigmaReparam
from equipoise.remedies.temperature import Temperature
from equipoise.remedies.weights import MasterWeights, WeightCap

REMEDIES: dict[str, Callable[..., Remedy]] = {
    "learning_rate": LearningRate,
    "qk_norm": QKNorm,
    "qk_clip": QKClip,
    "temperature": Temperature,
    "head_temperature": HeadTemperature,
    "sigma_reparam": SigmaReparam,
    "soft_cap": SoftCap,
    "z_loss": ZLoss,
    "layer_norm_epsilon": LayerNormEpsilon,
    "update_clip": UpdateClip,
    "gradient_clip": GradientClip,
    "adaptive_clip": AdaptiveClip,
    "spike_handling": SpikeHandling,
    "skip_step": SkipStep,
    "roll_back": RollBack,
    "optimizer_reset": OptimizerReset,
    "beta2": Beta2,
    "keep_fp32": KeepFp32,
    "residual_scale": ResidualScale,
    "deepnorm_init": DeepNormInit,
    "path_init": PathInit,
    "router_balance": RouterBalance,
    "normaliser": NormaliserSwap,
    "group_learning_rates": GroupLearningRates,
    "weight_cap": WeightCap,
    "master_weights": MasterWeights,
}


def remedy(name: str, **options: Any) -> Remedy:
    """Return a remedy by its name, with options other than its defaults.

    >>> remedy("learning_rate", scale=0.1)
    LearningRate(scale=0.1, warmup=20)
    """
    if name not in REMEDIES:
        near = difflib.get_close_matches(name, REMEDIES, n=1, cutoff=0.0)[0]
        raise InputError(
            f"no remedy {name!r}; the nearest is {near} (equipoise remedies lists all)"
        )
    kind: Any = REMEDIES[name]
    known = [f.name for f in fields(kind) if f.name != "name"]
    for option in options:
        if option not in known:
            raise InputError(
                f"{name} has no option {option}; it has {', '.join(known) or 'none'}"
            )
    made: Remedy = kind(**options)
    return made
