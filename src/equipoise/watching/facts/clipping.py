"""Facts of clipping and of gradient scalers in a sampled step."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch

from equipoise.watching.facts.loop_record import Clip, LoopRecord

MOST = 8
"""Calls of one step that are stated: who clips layer by layer makes many."""


@dataclass(slots=True)
class ClippingFacts:
    """The calls that clipped gradients: by which norm, and when in the step."""

    record: LoopRecord
    name: str = "clipping"

    def facts(self) -> Mapping[str, Any]:
        limited = [clip for clip in self.record.clips if not isinf(clip.largest)]
        calls = [clip for clip in limited if not clip.nothing]
        return {
            "of_nothing": len(limited) - len(calls),
            "calls": len(calls),
            "before_backward": sum(clip.passes == 0 for clip in calls),
            "passes": self.record.passes,
            "each": [_call(clip) for clip in calls[:MOST]],
        }


def _call(clip: Clip) -> dict[str, Any]:
    found: dict[str, Any] = {
        "largest": clip.largest,
        "norm": clip.norm,
        "scaled": clip.scaled,
        "sharded": clip.sharded,
    }
    if clip.own is not None and clip.own_largest is not None:
        found |= {"own": clip.own, "own_largest": clip.own_largest}
        found["precision"] = _precision(clip)
    return found


def _precision(clip: Clip) -> float:
    """Return the relative error that a norm in this format may have."""
    kind = clip.norm.dtype
    return float(torch.finfo(kind).eps) if kind.is_floating_point else 0.0


@dataclass(slots=True)
class ScalerFacts:
    """The gradient scaler in force, and its factor."""

    record: LoopRecord
    name: str = "scaler"

    def facts(self) -> Mapping[str, Any]:
        scaler = self.record.scaler() if self.record.scaler is not None else None
        if scaler is None or not scaler.is_enabled():
            return {}
        factor = scaler._scale
        kind = {"class": type(scaler).__name__}
        return kind if factor is None else {**kind, "factor": factor.detach().clone()}
