"""What a normaliser costs inside the lab's model: forward and backward at L = 1024.

Every arm is the same model with the same weights, run in turns; the first is the eager
path with ``torch.softmax``, which is what a user's eager attention does.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.table import cpu_seconds, publish
from equipoise.lab.models import GPT, GPTConfig
from equipoise.remedies.weigher import LEARNABLE, Weigher

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
REPEATS = 7


def pass_of(name: str | None, *, sharp: float, batch: int = 1) -> Callable[[], object]:
    """Return a forward and backward pass; ``sharp`` multiplies the query weights."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(0, 256, (batch, SHAPE.context))
    for block in model.blocks:
        attention = block.get_submodule("attention")
        heads = SHAPE.heads if name in LEARNABLE and name != "sink" else None
        attention.normaliser = (
            Weigher(name, heads=heads) if name else lambda z: z.softmax(-1)
        )
        attention.get_submodule("q_proj").weight.data.mul_(sharp)

    def once() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return once


def main() -> None:
    torch.set_num_threads(1)
    names = [*UNBARRED[:1], *BARS, *UNBARRED[1:]]
    rows = []
    for said, sharp in (("flat", 1.0), ("sharp", 30.0)):
        arms = [pass_of(name, sharp=sharp) for name in (None, *names)]
        for arm in arms:
            arm()
        (eager, _), *times = cpu_seconds(*arms, repeats=REPEATS)
        for name, (median, worst) in zip(names, times, strict=True):
            rows.append(
                {
                    "scores": said,
                    "normaliser": name,
                    "median, s": median,
                    "÷ eager softmax": median / eager,
                    "worst": worst / eager,
                    "bar": BARS.get(name, ""),
                }
            )
    publish("normaliser_cost", rows, shape=vars(SHAPE), repeats=REPEATS, batch=1)


if __name__ == "__main__":
    main()
