"""Bars of the head predictor, on random and on trained heads."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from benchmarks.fragility_subjects import minilm
from benchmarks.table import publish
from equipoise.numerics.formats import FORMATS, Format
from equipoise.numerics.fragility import head_error
from tests.numerics.fragility_heads import Head, heads
from tests.oracles.fragility import measured_head_error

NARROW = ("fp16", "bf16", "e4m3", "e5m2")
RANDOM = 600


def trained_heads() -> list[Head]:
    """Return the 72 heads of MiniLM on a sentence."""
    model, batch = minilm(long=True)
    names = ("query", "key", "value")
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(i: int, name: str) -> Callable[..., None]:
        return lambda module, args, y: seen.__setitem__(
            (i, name), y.detach()[0].double()
        )

    with ExitStack() as exits, torch.no_grad():
        for i, layer in enumerate(model.encoder.layer):
            for name in names:
                module = getattr(layer.attention.self, name)
                exits.callback(module.register_forward_hook(keep(i, name)).remove)
        model(**batch)
    found: list[Head] = []
    for i, layer in enumerate(model.encoder.layer):
        q, k, v = (seen[i, n].unflatten(-1, (12, -1)).transpose(0, 1) for n in names)
        w = layer.attention.output.dense.weight.detach().double().mT
        w = w.unflatten(0, (12, -1))
        found += [Head(q[h], k[h], v[h], w[h], None, "trained") for h in range(12)]
    return found


def judged(sample: list[Head], format: Format) -> dict[str, float]:
    foreseen = [
        head_error(h.qkv, h.w, format=format, visible_QK=h.visible).relative.item()
        for h in sample
    ]
    seen = [
        measured_head_error(h.parts, format, visible=h.visible).item() for h in sample
    ]
    ratio = np.array(seen) / np.array(foreseen)
    null = np.array(seen) / np.median(seen)
    low, median, high = np.percentile(ratio, [5, 50, 95])
    return {
        "median": median,
        "p5": low,
        "p95": high,
        "log-corr": np.corrcoef(np.log(seen), np.log(foreseen))[0, 1],
        "null p5": np.percentile(null, 5),
        "null p95": np.percentile(null, 95),
        "null log-corr": 0.0,
    }


def main() -> None:
    random, trained = list(heads(RANDOM, seed=0)), trained_heads()
    rows = [
        {
            "format": name,
            "heads": kind,
            "n": len(sample),
            **judged(sample, FORMATS[name]),
        }
        for name in NARROW
        for kind, sample in (("random", random), ("trained", trained))
    ]
    publish("fragility_heads", rows)


if __name__ == "__main__":
    main()
