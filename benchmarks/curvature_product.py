"""One full Hessian product on a GPT-2-small-shaped model: time and peak memory.

124M parameters, 512 tokens, batch 1, float32. The product is made from scratch (forward
pass, gradient, second backward pass), as one who needs a single product pays it, and
again with the graph kept, as an eigenvalue search pays it. The unit is a plain forward
and backward pass of the same model with torch's fused attention, in the same process,
in turns, in CPU seconds. The process's peak resident memory includes everything.
"""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.table import publish
from equipoise.auditing.curvature import hessian
from tests.models import GPT, GPTConfig

LENGTH, REPEATS = 512, 2


def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = GPTConfig(width=768, depth=12, heads=12, context=1024, vocabulary=50257)
    tokens = torch.randint(0, 50257, (1, LENGTH + 1))
    return GPT(shape).eval(), (tokens[:, :-1], tokens[:, 1:])


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    torch.autograd.grad(loss, list(model.parameters()))


def seconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def peak() -> float:
    """Return the process's largest resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    model, batch = subject()
    spent: dict[str, list[float]] = {"plain": [], "first": [], "kept": []}
    plain(model, batch)
    before = peak()
    for _ in range(REPEATS):
        operator = hessian(model, batch)
        v_N = operator.start(torch.Generator().manual_seed(0))
        spent["plain"].append(seconds(partial(plain, model, batch)))
        spent["first"].append(seconds(partial(operator, v_N)))
        spent["kept"].append(seconds(partial(operator, v_N)))
        del operator
    unit = min(spent["plain"])
    rows = [
        {
            "what": words,
            "CPU seconds, best": min(spent[name]),
            "worst": max(spent[name]),
            "÷ forward-backward": min(spent[name]) / unit,
            "worst ratio": max(
                a / b for a, b in zip(spent[name], spent["plain"], strict=True)
            ),
        }
        for name, words in {
            "plain": "forward and backward",
            "first": "Hessian product, from scratch",
            "kept": "Hessian product, graph kept",
        }.items()
    ]
    publish(
        "curvature_product",
        rows,
        parameters=sum(p.numel() for p in model.parameters()),
        length=LENGTH,
        peak_gib=peak(),
        peak_gib_before=before,
    )
    print(
        f"peak {peak():.2f} GiB (forward-backward alone {before:.2f})", file=sys.stderr
    )


if __name__ == "__main__":
    main()
