"""Two small made-up runs, shaped like a pre-LN and a post-LN training."""

import math
from pathlib import Path

import numpy as np

from equipoise.records import Finding, Reading, RunInfo
from equipoise.store import Run, RunWriter, open_run

LAYERS, HEADS = 24, 4
BLOCKS = tuple(f"blocks.{i}" for i in range(LAYERS))
ATTENTION = tuple(f"{block}.attention" for block in BLOCKS)


def pre_and_post(folder: Path, *, steps: int = 200) -> dict[str, Run]:
    """Return them written and open."""
    return {
        "pre-LN": healthy(folder / "pre.eqp", steps=steps),
        "post-LN": failing_run(folder / "post.eqp", steps=steps),
    }


def healthy(path: Path, *, steps: int) -> Run:
    rng = np.random.default_rng(0)
    with RunWriter(path, _info("pre-LN")) as writer:
        for step in range(steps):
            value = 5.5 * math.exp(-step / 90) + 2.4 + 0.08 * rng.standard_normal()
            slope = np.linspace(0.6, 0.3, LAYERS)
            writer.append(_step(step, value, slope, rng, sharp=step / steps / 3))
    return open_run(path)


def failing_run(path: Path, *, steps: int) -> Run:
    rng = np.random.default_rng(1)
    finding = Finding(
        step=50,
        severity="error",
        code="gradient.vanishing",
        site="blocks.0",
        message="The first layer's gradient is 12 000 times smaller than the last's.",
        advice="move the norms before the sub-layers (pre-LN), or use DeepNorm",
        params={"first": 2.1e-05, "last": 0.26},
    )
    with RunWriter(path, _info("post-LN")) as writer:
        for step in range(steps):
            value = 5.5 * math.exp(-step / 40) + 3.3 + 0.05 * rng.standard_normal()
            slope = np.geomspace(2e-5 if step else 2e-4, 0.3, LAYERS)
            found = [finding] if step == 50 else []
            writer.append(_step(step, value, slope, rng, sharp=0.02), findings=found)
    return open_run(path)


def _info(name: str) -> RunInfo:
    details = {"model": "GPT", "parameters": 1_234_567, "blocks": list(BLOCKS)}
    return RunInfo(
        name=name, created="2026-11-15T20:00:00+00:00", version="0.1.0", details=details
    )


def _step(
    step: int, loss: float, slope: np.ndarray, rng: np.random.Generator, *, sharp: float
) -> list[Reading]:
    readings = [Reading.scalar(step, "loss", loss)]
    if step % 5:
        return readings
    noise = np.exp(0.1 * rng.standard_normal(LAYERS))
    norms = [*(slope * noise), 0.05]
    total = math.sqrt(sum(v * v for v in norms))
    readings.append(Reading.scalar(step, "gradient.norm.total", total))
    # As read during the backward pass: the last layer first.
    readings.append(
        _per_site(step, "gradient.norm", (*BLOCKS, "embed")[::-1], norms[::-1])
    )
    for name, top in (("p5", 1 - 2 * sharp), ("p50", 1 - sharp / 2), ("p100", 1.0)):
        heads = np.clip(top - sharp * rng.random((LAYERS, HEADS)), 0, 1)
        readings.append(
            Reading(
                step=step,
                quantity=f"attention.theta.{name}",
                sites=ATTENTION,
                values=tuple(map(tuple, heads.tolist())),
            )
        )
    return readings


def _per_site(
    step: int, quantity: str, sites: tuple[str, ...], values: list[float]
) -> Reading:
    rows = tuple((value,) for value in values)
    return Reading(step=step, quantity=quantity, sites=sites, values=rows)
