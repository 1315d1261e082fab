"""What predicting GPT-2 small at L = 256 costs, in fp32 forward passes."""

import statistics
import time

import torch
from transformers import GPT2Config, GPT2Model

from benchmarks.table import publish
from equipoise.lab.models import GPT, GPTConfig
from equipoise.precision.emulation import Storage
from equipoise.precision.prediction import predicted

REPEATS = 3


def ratio(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, float]:
    storage = Storage.named("bf16")
    forward, whole = [], []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        with torch.no_grad():
            model(ids)
        middle = time.process_time()
        predicted(model, ids, storage=storage)
        forward.append(middle - start)
        whole.append(time.process_time() - middle)
    ratios = [w / f for f, w in zip(forward[1:], whole[1:], strict=True)]
    return {
        "forward, s": statistics.median(forward[1:]),
        "prediction ÷ forward": statistics.median(ratios),
        "worst": max(ratios),
        "on top of the forward it rides on": statistics.median(ratios) - 1,
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hugging = GPT2Model(GPT2Config()).eval()
    ours = GPT(
        GPTConfig(width=768, depth=12, heads=12, context=256, vocabulary=4096)
    ).eval()
    ids = torch.randint(0, 4096, (1, 256))
    rows = []
    for name, model in (
        ("Hugging Face GPT-2 small", hugging),
        ("lab GPT of that shape, 4096 words", ours),
    ):
        rows.append({"model": name, **ratio(model, ids)})
        publish("fragility_cost", rows, tokens=256, probes=1, format="bf16")


if __name__ == "__main__":
    main()
