"""What predicting GPT-2 small at L = 256 costs, in fp32 forward passes.

Beside it stands a forward and a backward pass to the activations alone (weights frozen,
nothing read): what a prediction that looks at the whole output must spend. All
contestants of a model take turns in one process; ratios are of the least CPU seconds
seen, because on a shared machine every other disturbance only adds. About two minutes.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from benchmarks.table import publish
from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.subject import output_of
from tests.models import GPT, GPTConfig

REPEATS = 4


def floor(model: nn.Module, ids: Tensor) -> None:
    """Run forward, and backward to what the embeddings gave; weights are frozen."""
    leaf: list[Tensor] = []

    def start(module: nn.Module, args: object, y: Tensor) -> Tensor:
        leaf.append(y.detach().requires_grad_())
        return leaf[-1]

    words = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    handle = words.register_forward_hook(start)
    y = output_of(model, ids)
    handle.remove()
    torch.autograd.grad(y, leaf, torch.ones_like(y))


def least(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least CPU seconds of each, run in turns."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(REPEATS):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def ratio(model: nn.Module, ids: Tensor) -> dict[str, float]:
    storage = Storage.named("bf16")
    model.eval().requires_grad_(False)

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    spent = least(
        {
            "forward": forward,
            "forward + activations' backward": lambda: floor(model, ids),
            "prediction": lambda: predicted(model, ids, storage=storage),
            "prediction, all rows and words": lambda: predicted(
                model, ids, storage=storage, rows=None, words=None
            ),
        }
    )
    one = spent.pop("forward")
    found = predicted(model, ids, storage=storage)
    return {
        "forward, s": one,
        **{name: s / one for name, s in spent.items()},
        "sampling error": found.sampling_error,
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = GPTConfig(width=768, depth=12, heads=12, context=256, vocabulary=50257)
    subjects: dict[str, Callable[[], nn.Module]] = {
        "GPT-2 small (Hugging Face), 50257 words": lambda: GPT2LMHeadModel(
            GPT2Config()
        ),
        "lab GPT of that shape, 50257 words": lambda: GPT(shape),
        "GPT-2 small without its head": lambda: GPT2Model(GPT2Config()),
    }
    ids = torch.randint(0, 4096, (1, 256))
    rows = [{"model": name, **ratio(made(), ids)} for name, made in subjects.items()]
    publish("fragility_cost", rows, tokens=256, probes=1, repeats=REPEATS)


if __name__ == "__main__":
    main()
