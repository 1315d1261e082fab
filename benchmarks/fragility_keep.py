"""How many modules prediction keeps wide, and what keeping them natively comes to.

``python -m benchmarks.fragility_keep`` counts modules, by prediction and by greedy
re-measurement. ``python -m benchmarks.fragility_keep applied`` applies the advice with
the remedy ``keep_fp32`` and runs the model in the narrow dtype: the error beside the
promised one, autocast's, and those of random sets of the same size. *fp32 products*:
multiplications of matrix products whose operands are float32, as a share of all;
*fp32 numbers*: results of other operations that are float32.
"""

import copy
import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.fragility_subjects import (
    minilm,
    text_batch,
    trained_gpt,
    trained_gpt2,
    trained_vit,
)
from benchmarks.table import publish
from equipoise.auditing.precision.emulation import Bench, Storage, relative_error
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.study import (
    KeepList,
    kept_by_measurement,
    kept_by_prediction,
)
from equipoise.auditing.subject import Batch, output_of
from equipoise.remedies.precision import kept_in_fp32

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DRAWS = 5


class Work(TorchDispatchMode):
    """Counts what is computed in float32, and all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.wide_products = self.wide_numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, tuple | list) and made else made
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=made)
            self.products += flops
            read = next(x for x in args if isinstance(x, Tensor))
            self.wide_products += flops if read.dtype is torch.float32 else 0
        elif isinstance(first, Tensor) and first.dtype is torch.float32:
            self.wide_numbers += first.numel() if first._base is None else 0
        return made


def applied(
    bench: Bench, model: nn.Module, batch: Batch, around: AbstractContextManager[Any]
) -> dict[str, float]:
    """Return the error of a native run inside a context, and its work in float32."""
    with torch.no_grad(), around, Work() as work:
        found = output_of(model, batch)
    return {
        "error": relative_error(found, bench.reference),
        "fp32 products": work.wide_products / work.products,
        "fp32 numbers": float(work.wide_numbers),
    }


def keeping(
    bench: Bench, subject: tuple[nn.Module, Batch], names: Sequence[str], format: str
) -> dict[str, float]:
    twin = copy.deepcopy(subject[0])
    kept = kept_in_fp32(twin, list(names), narrow=NARROW[format])
    return applied(bench, twin, subject[1], kept)


def advice(bench: Bench, subject: tuple[nn.Module, Batch], format: str) -> KeepList:
    storage = Storage.named(format)
    found = predicted(*subject, storage=storage, probes=4)
    target = bench.keeping(storage) / 2
    return kept_by_prediction(bench, found, storage=storage, target=target)


def row(name: str, subject: tuple[nn.Module, Batch], format: str) -> dict[str, Any]:
    bench, rng = Bench(*subject), random.Random(f"{name} {format}")
    kept = advice(bench, subject, format)
    ours = keeping(bench, subject, kept.sites, format)
    sites = list(bench.sites(Storage.named(format)))
    others = [
        keeping(bench, subject, rng.sample(sites, len(kept.sites)), format)["error"]
        for _ in range(DRAWS)
    ]
    cast = torch.autocast("cpu", NARROW[format])
    auto = applied(bench, *subject, cast)
    plain = keeping(bench, subject, (), format)
    whole = applied(bench, *subject, nullcontext())
    return {
        "model": name,
        "format": format,
        "kept": f"{len(kept.sites)} of {len(sites)}",
        "promised": kept.measured,
        "predicted": kept.predicted,
        "applied": ours["error"],
        "applied / promised": ours["error"] / kept.measured,
        "all narrow": plain["error"],
        "autocast": auto["error"],
        "random sets": sum(others) / DRAWS,
        "best random set": min(others),
        "fp32 products, ours": ours["fp32 products"],
        "fp32 products, autocast": auto["fp32 products"],
        "fp32 numbers, ours": ours["fp32 numbers"] / whole["fp32 numbers"],
        "fp32 numbers, autocast": auto["fp32 numbers"] / whole["fp32 numbers"],
    }


def natively() -> None:
    batch = text_batch()
    subjects = {
        "MiniLM": minilm(long=True),
        "MiniLM, 6 sentences": minilm(each=True),
        "lab GPT": (trained_gpt()[0], batch),
        "HF GPT-2": (trained_gpt2()[0], batch),
    }
    rows = [row(n, subject, f) for n, subject in subjects.items() for f in NARROW]
    publish("fragility_applied", rows)


def counted() -> None:
    storage = Storage.named("bf16")
    subjects = {
        "lab GPT": trained_gpt(),
        "lab ViT": trained_vit(),
        "MiniLM, 2 layers": minilm(layers=2),
        "MiniLM, 6 layers": minilm(),
    }
    rows = []
    for name, (model, batch) in subjects.items():
        bench = Bench(model, batch)
        found = predicted(model, batch, storage=storage, probes=2)
        for part in (0.7, 0.5):
            target = part * bench.mismatch(storage)
            ours = kept_by_prediction(bench, found, storage=storage, target=target)
            greedy = kept_by_measurement(bench, storage=storage, target=target)
            rows.append(
                {
                    "model": name,
                    "modules": len(found.variance),
                    "target": f"{part} of the error",
                    "by prediction": len(ours.sites),
                    "by greedy re-measurement": len(greedy.sites),
                    "ratio": len(ours.sites) / max(1, len(greedy.sites)),
                    "reached": ours.reached,
                }
            )
            publish("fragility_keep", rows)


def main() -> None:
    torch.set_num_threads(1)
    if "applied" in sys.argv[1:]:
        natively()
    else:
        counted()


if __name__ == "__main__":
    main()
