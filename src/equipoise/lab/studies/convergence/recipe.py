"""Petrov's question about data, on a ViT and a byte-level GPT of three sizes each."""

from dataclasses import replace

from equipoise.lab.data import DataOptions
from equipoise.lab.models import GPTConfig, ViTConfig
from equipoise.lab.running.experiment import Arm, Experiment
from equipoise.lab.training.options import TrainOptions

GPT = GPTConfig(depth=2, heads=2, context=32)
VIT = ViTConfig(image=8, patch=2, channels=1, depth=2, heads=2)
WIDTHS = (16, 32, 64)
"""Each has four times the weights of the one before, embeddings apart."""
MORE = 4
"""Times as many steps: the GPT sees every window once, so times as much data."""

MEASURES = (
    "validation",
    "mean_loss_at",
    "slope_null",
    "slope_at",
    "slope_sharp",
    "slope_random",
    "variance_law_at",
    "variance_law_sharp",
    "variance_law_random",
    "mean_loss_sharp",
    "mean_loss_random",
    "share_value",
    "share_slope",
    "share_bend",
    "share_rest",
    "paper_fails",
    "paper_ratio",
    "ours_fails",
    "ours_ratio",
    "delta2_ratio",
    "k_star_at",
    "gradient_norm",
    "sharpness_plain",
)


def convergence(quick: bool) -> Experiment:
    """Does |𝓛_{k+1} − 𝓛_k| know anything of curvature, and is it a reason to grow?

    The GPT's arms come in pairs, of which the second sees four times the data; so a
    model four times as large can be set against four times the data.
    """
    steps = 60 if quick else 150
    train = TrainOptions(
        steps=steps, batch=16, warmup=10, lr=3e-3, weight_decay=0.0, watch=False
    )
    widths = WIDTHS[:2] if quick else WIDTHS
    gpts = tuple(
        Arm(
            name=f"gpt-{width}-{times}x",
            model=replace(GPT, width=width),
            train=replace(train, steps=times * steps),
            judges=("convergence",),
        )
        for width in widths
        for times in (1, MORE)
    )
    vits = tuple(
        Arm(
            name=f"vit-{width}",
            model=replace(VIT, width=width),
            train=replace(train, steps=2 * steps, batch=32),
            data=DataOptions(source="digits"),
            judges=("convergence",),
        )
        for width in widths
    )
    return Experiment(
        name="convergence",
        question="Does the loss difference say whether to grow the model or the data?",
        arms=(*gpts, *vits),
        seeds=(42,) if quick else (42, 123, 456),
        measures=MEASURES,
    )
