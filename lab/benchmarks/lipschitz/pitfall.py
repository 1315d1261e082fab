"""What ignoring rotation costs: ‖W_K q_i‖ once per query instead of once per pair.

The rotated q_i is carried back as if it had not been rotated. The result looks like a
bound and is smaller than the truth on some layers.
"""

from dataclasses import replace
from typing import Any

import torch

from equipoise.theory.lipschitz.forward import AttentionForward, attend
from equipoise.theory.lipschitz.local import local_paths
from equipoise_lab.models.gpt import GPTConfig
from equipoise_lab.theory.lipschitz.joint import block_norms, dual_rows, joint_rows
from lab.benchmarks.lipschitz.specimens import gaussian


def careless(attended: AttentionForward) -> AttentionForward:
    """Return the same attention with the rotation forgotten on the way back."""
    return replace(attended, heads=replace(attended.heads, rotary=None))


def rows() -> list[dict[str, Any]]:
    found = []
    for heads in (1, 2, 4):
        for gain in (1.0, 2.0, 3.0, 4.0):
            config = GPTConfig(width=16 * heads, heads=heads, positions="rope")
            specimen = gaussian(replace(config, qkv_bias=False), 24, gain, "")
            found.append({"heads": heads, "gain": gain} | _ratios(specimen))
    return found


def _ratios(specimen: Any) -> dict[str, float]:
    attended = attend(specimen.heads, specimen.x)
    lower = dual_rows(attended).lower
    wrong = careless(attended)
    bounds = {
        "local": local_paths(wrong).total_HQ.sum(0),
        "joint": joint_rows(wrong),
        "blocks": block_norms(wrong).sum(-1),
    }
    worst = {f"{k} row": float((v / lower).min()) for k, v in bounds.items()}
    layer = {k: float(torch.max(v) / lower.max()) for k, v in bounds.items()}
    return layer | worst
