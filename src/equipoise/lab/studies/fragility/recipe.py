"""Training itself in three precisions; Baek's are in ``lab.fragility_study``."""

from dataclasses import replace
from typing import get_args

from equipoise.lab.data import DataOptions
from equipoise.lab.models import vit_preset
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import Precision, TrainOptions


def precision(quick: bool) -> Experiment:
    """Tiny-ViT of 65 tokens trained in fp32, bf16 and fp16, same seeds and data.

    Digits of 8 × 8 pixels, one pixel a patch, stand for CIFAR-10's 64 patches.
    """
    shape = replace(vit_preset("baek-tiny"), image=8, patch=1, channels=1)
    train = TrainOptions(
        steps=60 if quick else 195, batch=32, warmup=0, weight_decay=0.0
    )
    arms = tuple(
        Arm(
            name=f"{width}-{precision}",
            model=replace(shape, width=width),
            train=replace(train, precision=precision),
            data=DataOptions(source="digits"),
        )
        for width in (96, 128)
        for precision in get_args(Precision)
    )
    return Experiment(
        name="precision",
        question="Does the precision of training change what is learnt, or κ_softmax?",
        arms=arms[:3] if quick else arms,
        seeds=(0, 1) if quick else (0, 1, 2, 3, 4),
        measures=("validation", "accuracy", "loss", "spikes"),
    )
