"""Petrov's pictures of curvature, over training, on a ViT and a byte-level GPT."""

from dataclasses import replace

from equipoise.lab.data import DataOptions
from equipoise.lab.models import GPTConfig, vit_preset
from equipoise.lab.running.experiment import SEEDS, Arm, Experiment
from equipoise.lab.studies.curvature.measurement import GROUPS
from equipoise.lab.training.options import TrainOptions

VIT = replace(vit_preset("petrov-mnist"), image=8, patch=2)
"""The paper's block on digits of 8 × 8 pixels: 16 tokens."""
SMALL = [name for name in GROUPS if name != "block"]
GPT = GPTConfig(width=16, depth=1, heads=1, ffn_width=64, context=16)


def curvature(quick: bool) -> Experiment:
    """Which group's Hessian is largest, at the start and after training?

    A constant rate after warm-up makes shorter runs the beginning of longer ones; the
    arm at 0 takes one step too small to move a weight.
    """
    lengths = (0, 100) if quick else (0, 200, 400, 600, 800, 1000)
    arms = tuple(
        Arm(
            name=f"{kind}-{steps}",
            model=model,
            train=_train(steps),
            data=data,
            judges=("curvature", "entries")
            if steps in (lengths[0], lengths[-1])
            else ("curvature",),
        )
        for kind, model, data in (
            ("vit", VIT, DataOptions(source="digits")),
            ("gpt", GPT, DataOptions()),
        )
        for steps in lengths
    )
    return Experiment(
        name="curvature",
        question="Whose Hessian is largest, and does that change with training?",
        arms=arms[: len(lengths)] if quick else arms,
        seeds=(42,) if quick else SEEDS,
        measures=(
            "validation",
            *(f"hessian_{name}" for name in GROUPS),
            *(f"negative_{name}" for name in ("FF", "LN2", "block")),
            *(f"weights_{name}" for name in SMALL),
            "trace_block",
            *(f"entries_{a}_{b}" for i, a in enumerate(SMALL) for b in SMALL[: i + 1]),
        ),
    )


def _train(steps: int) -> TrainOptions:
    still = steps == 0
    return TrainOptions(
        steps=max(1, steps),
        batch=64,
        lr=1e-12 if still else 1e-3,
        warmup=1 if still else 100,
        floor=1.0,
        weight_decay=0.0,
        watch=False,
    )
