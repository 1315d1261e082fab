"""The certified bound against 10⁴ heads in emulation: never exceeded, and how loose.

Three quarters are random, a quarter is made to hurt (``adversarial``).
"""

from collections.abc import Iterable

import numpy as np

from benchmarks.table import publish
from equipoise.numerics.formats import FORMATS, Format
from equipoise_lab.theory.fragility_bounds import head_bound
from tests.numerics.fragility_heads import Head, adversarial, heads
from tests.oracles.fragility import measured_head_error

RANDOM, ADVERSARIAL = 1900, 640


def bound_row(format: Format, sample: Iterable[Head]) -> dict[str, float]:
    slack, violated, unbounded = [], 0, 0
    for h in sample:
        small = Head(h.q[:24], h.k[:24], h.v[:24], h.w, None, h.kind)
        bound = head_bound(small.qkv, small.w, format=format).relative.item()
        seen = measured_head_error(small.parts, format).item()
        violated += seen > bound
        unbounded += not np.isfinite(bound)
        if seen:
            slack.append(bound / seen)
    return {
        "count": len(slack),
        "violated": violated,
        "may overflow": unbounded,
        "tightest": min(slack),
        "median": float(np.median(slack)),
    }


def main() -> None:
    rows = []
    for seed, name in enumerate(("fp16", "bf16", "e4m3", "e5m2")):
        samples = {
            "random": heads(RANDOM, seed=seed),
            "adversarial": adversarial(ADVERSARIAL, seed=100 + seed),
        }
        for kind, sample in samples.items():
            found = bound_row(FORMATS[name], sample)
            rows.append({"format": name, "heads": kind, **found})
            publish("fragility_bound", rows)


if __name__ == "__main__":
    main()
