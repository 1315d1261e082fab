"""The certified bound against 10⁴ heads in emulation: never exceeded, and how loose."""

import numpy as np

from benchmarks.table import publish
from equipoise.numerics.formats import FORMATS, Format
from equipoise.numerics.fragility_bound import head_bound
from tests.numerics.fragility_heads import Head, heads
from tests.oracles.fragility import measured_head_error

BOUNDED = 2500


def bound_row(format: Format, count: int, seed: int) -> dict[str, float]:
    slack, violated = [], 0
    for h in heads(count, seed=seed):
        small = Head(h.q[:24], h.k[:24], h.v[:24], h.w, None, h.kind)
        bound = head_bound(small.qkv, small.w, format=format).relative.item()
        seen = measured_head_error(small.parts, format).item()
        violated += seen > bound
        slack.append(bound / seen)
    return {
        "heads": count,
        "violated": violated,
        "tightest": min(slack),
        "median": float(np.median(slack)),
    }


def main() -> None:
    rows = [
        {"format": name, **bound_row(FORMATS[name], BOUNDED, seed)}
        for seed, name in enumerate(("fp16", "bf16", "e4m3", "e5m2"))
    ]
    publish("fragility_bound", rows)


if __name__ == "__main__":
    main()
