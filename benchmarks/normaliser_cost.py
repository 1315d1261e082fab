"""What a normaliser costs inside the lab's model: forward and backward at L = 1024.

Every arm is the same model with the same weights, run in turns; the first is the eager
path with ``torch.softmax``, which is what a user's eager attention does.
"""

from collections.abc import Callable

import entmax
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.table import cpu_seconds, publish
from equipoise.remedies.normaliser import NormaliserModule
from tests.models import GPT, GPTConfig

SHAPE = GPTConfig(width=64, depth=2, heads=4, context=1024)
BARS = {
    "ssmax": 2.0,
    "sigmoid": 2.0,
    "softmax1": 2.0,
    "sink": 2.0,
    "self-adjusted": 3.0,
    "self-adjusted-safe": 3.0,
    "softpick": 3.0,
    "sparsemax": 4.0,
    "entmax15": 4.0,
    "entmax": 10.0,
}
"""Normaliser → the most it may cost, in eager softmaxes; α of entmax is learnt."""
UNBARRED = ("softmax", "asentmax", "adaptive-temperature")
LIBRARY = {
    "sparsemax, entmax library": entmax.sparsemax,
    "entmax15, entmax library": entmax.entmax15,
}
REPEATS = 5
Weigh = Callable[[Tensor], Tensor]


def weigher(name: str) -> Weigh:
    """Return what the attention modules weigh with; entmax learns its α."""
    if name == "eager":
        return lambda z: z.softmax(-1)
    if name in LIBRARY:
        return LIBRARY[name]
    return NormaliserModule(name, heads=SHAPE.heads if name == "entmax" else None)


def pass_of(name: str, *, sharp: float) -> Callable[[], object]:
    """Return a forward and backward pass; ``sharp`` multiplies the query weights."""
    torch.manual_seed(0)
    model, tokens = GPT(SHAPE), torch.randint(0, 256, (1, SHAPE.context))
    for block in model.blocks:
        attention = block.get_submodule("attention")
        attention.normaliser = weigher(name)
        attention.get_submodule("q_proj").weight.data.mul_(sharp)

    def once() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return once


def compared(said: str, *, sharp: float) -> list[dict[str, object]]:
    """Return a row per normaliser, timed in turns with eager softmax."""
    names = ["eager", *UNBARRED, *BARS, *LIBRARY]
    arms = [pass_of(name, sharp=sharp) for name in names]
    for arm in arms:
        arm()
    times = cpu_seconds(*arms, repeats=REPEATS)
    eager = times[0][0]
    return [
        {
            "scores": said,
            "normaliser": name,
            "median, s": median,
            "÷ eager softmax": median / eager,
            "worst": worst / eager,
            "bar": BARS.get(name, ""),
        }
        for name, (median, worst) in zip(names, times, strict=True)
    ]


def main() -> None:
    torch.set_num_threads(1)
    rows = [*compared("flat", sharp=1.0), *compared("sharp", sharp=30.0)]
    publish("normaliser_cost", rows, shape=vars(SHAPE), repeats=REPEATS, batch=1)


if __name__ == "__main__":
    main()
