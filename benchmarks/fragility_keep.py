"""How many modules prediction keeps wide, and what keeping them natively comes to.

``python -m benchmarks.fragility_keep`` counts modules, by prediction and by greedy
re-measurement. ``python -m benchmarks.fragility_keep applied [MODEL FORMAT …]`` applies
the advice with the remedy ``keep_fp32`` and runs the model in the narrow dtype: the
error beside the promised one, autocast's, and those of random sets of the same size.
*fp32 products*: multiplications of matrix products that read a number which the narrow
dtype cannot hold, as a share of all; *fp32 numbers*: results that are float32. *Equal
work*: a set with narrow products and no more fp32 numbers than autocast makes.
"""

import copy
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
from equipoise.auditing.precision.prediction import Prediction, predicted
from equipoise.auditing.precision.study import (
    KeepList,
    kept_by_measurement,
    kept_by_prediction,
    kept_within,
)
from equipoise.auditing.subject import Batch, output_of
from equipoise.remedies.precision import kept_in_fp32

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DRAWS = 5


class Work(TorchDispatchMode):
    """Counts what is computed in float32, and all matrix products.

    A product counts as one in float32 if an operand holds a number that the narrow
    dtype cannot hold. A cast computes nothing.
    """

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.narrow = narrow
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
            wide = any(isinstance(x, Tensor) and self._is_wide(x) for x in args)
            self.wide_products += flops if wide else 0
        if isinstance(first, Tensor) and first.dtype is torch.float32:
            new = first._base is None and func is not torch.ops.aten._to_copy.default
            self.wide_numbers += first.numel() if new else 0
        return made

    def _is_wide(self, x: Tensor) -> bool:
        return x.dtype is torch.float32 and not torch.equal(
            x.to(self.narrow).float(), x
        )


def applied(
    bench: Bench,
    model: nn.Module,
    around: AbstractContextManager[Any],
    *,
    format: str,
) -> dict[str, float]:
    """Return the error of a native run inside a context, and its work in float32."""
    with torch.no_grad(), around, Work(NARROW[format]) as work:
        found = output_of(model, bench.batch)
    return {
        "error": relative_error(found, bench.reference),
        "fp32 products": work.wide_products / work.products,
        "fp32 numbers": float(work.wide_numbers),
    }


def keeping(
    bench: Bench, names: Sequence[str], format: str, *, narrow_products: bool = False
) -> dict[str, float]:
    twin, narrow = copy.deepcopy(bench.model), NARROW[format]
    kept = kept_in_fp32(
        twin, list(names), narrow=narrow, narrow_products=narrow_products
    )
    return applied(bench, twin, kept, format=format)


def promise(bench: Bench, found: Prediction, storage: Storage) -> KeepList:
    """Return the set for half of the error, as ``equipoise precision`` names it."""
    target = bench.keeping(storage) / 2
    return kept_by_prediction(bench, found, storage=storage, target=target)


def at_equal_work(
    bench: Bench, found: Prediction, storage: Storage, *, most: float
) -> tuple[KeepList, dict[str, float]]:
    """Return the set and what it comes to with no more wide numbers than autocast's.

    What reads a wide number computes wide too, so the budget of the set itself is
    lowered until the numbers counted in the native run suffice.
    """
    budget = most
    while True:
        kept = kept_within(bench, found, storage=storage, numbers=budget)
        ours = keeping(bench, kept.sites, storage.format.name, narrow_products=True)
        if ours["fp32 numbers"] <= most:
            return kept, ours
        budget *= 0.96


def random_errors(
    bench: Bench, count: int, format: str, **options: bool
) -> list[float]:
    rng = random.Random(f"{count} {format}")
    sites = list(bench.sites(Storage.named(format)))
    return [
        keeping(bench, rng.sample(sites, count), format, **options)["error"]
        for _ in range(DRAWS)
    ]


def row(name: str, subject: tuple[nn.Module, Batch], format: str) -> dict[str, Any]:
    bench, storage = Bench(*subject), Storage.named(format, fused=True)
    found = predicted(*subject, storage=storage, probes=4)
    kept = promise(bench, found, storage)
    ours = keeping(bench, kept.sites, format)
    others = random_errors(bench, len(kept.sites), format)
    cast = torch.autocast("cpu", NARROW[format])
    auto = applied(bench, bench.model, cast, format=format)
    whole = applied(bench, bench.model, nullcontext(), format=format)
    most = auto["fp32 numbers"]
    equal, within = at_equal_work(bench, found, storage, most=most)
    rest = random_errors(bench, len(equal.sites), format, narrow_products=True)
    return {
        "model": name,
        "format": format,
        "kept": f"{len(kept.sites)} of {len(found.variance)}",
        "promised": kept.measured,
        "predicted": kept.predicted,
        "applied": ours["error"],
        "applied / promised": ours["error"] / kept.measured,
        "applied / predicted": ours["error"] / kept.predicted,
        "all narrow": keeping(bench, (), format)["error"],
        "autocast": auto["error"],
        "random sets": sum(others) / DRAWS,
        "best random set": min(others),
        "fp32 products, ours": ours["fp32 products"],
        "fp32 products, autocast": auto["fp32 products"],
        "fp32 numbers, ours": ours["fp32 numbers"] / whole["fp32 numbers"],
        "fp32 numbers, autocast": auto["fp32 numbers"] / whole["fp32 numbers"],
        "equal work: kept": f"{len(equal.sites)} of {len(found.variance)}",
        "equal work: promised": equal.measured,
        "equal work: applied": within["error"],
        "equal work: applied / promised": within["error"] / equal.measured,
        "equal work: applied / autocast": within["error"] / auto["error"],
        "equal work: fp32 products": within["fp32 products"],
        "equal work: fp32 numbers / autocast": within["fp32 numbers"] / most,
        "equal work: random sets": sum(rest) / DRAWS,
    }


def natively(words: Sequence[str] = ()) -> None:
    """Run all models and formats, or those named; the other rows stay."""
    batch = text_batch()
    subjects = {
        "MiniLM": lambda: minilm(long=True),
        "MiniLM, 6 sentences": lambda: minilm(each=True),
        "lab GPT": lambda: (trained_gpt()[0], batch),
        "HF GPT-2": lambda: (trained_gpt2()[0], batch),
    }
    names = [word for word in words if word in subjects] or list(subjects)
    formats = [word for word in words if word in NARROW] or list(NARROW)
    pairs = [(n, f) for n in names for f in formats]
    made = [row(n, subjects[n](), f) for n, f in pairs]
    others = [r for r in _known() if (r["model"], r["format"]) not in pairs]
    order = [(n, f) for n in subjects for f in NARROW]
    rows = sorted(
        [*others, *made], key=lambda r: order.index((r["model"], r["format"]))
    )
    publish("fragility_applied", rows)


def _known() -> list[dict[str, Any]]:
    """Return the rows of the last run, so that single models can be run again."""
    path = Path(__file__).parent / "results" / "fragility_applied.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


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
        natively([word for word in sys.argv[1:] if word != "applied"])
    else:
        counted()


if __name__ == "__main__":
    main()
