"""Baek's Exp. 1 and 2 on Tiny-ViT (digits) and a byte GPT, with null predictors."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.table import publish
from equipoise.lab.fragility import Look, byte_gpt, leading, looks, tiny_vit, tracking

FORMATS = ("bf16", "fp16")
SEEDS = (0, 1, 2)


def digits(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = torch.randint(0, len(data.target), (32,), generator=rng)
    images = torch.tensor(data.images, dtype=torch.float32)[chosen, None] / 8 - 1
    return images, torch.tensor(data.target)[chosen]


def text(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    root = Path(__file__).parents[1] / "src" / "equipoise"
    words = (root / "records.py").read_bytes() + (root / "errors.py").read_bytes()
    data = torch.frombuffer(bytearray(words), dtype=torch.uint8).long()
    starts = torch.randint(0, len(data) - 33, (8,), generator=rng).tolist()
    rows = torch.stack([data[s : s + 33] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def runs(steps: int, every: int) -> list[Look]:
    found: list[Look] = []
    for seed in SEEDS:
        for width in (32, 64):
            torch.manual_seed(seed)
            for subject in (
                tiny_vit(width, digits, image=8, channels=1),
                byte_gpt(width, text, context=32),
            ):
                found += looks(
                    subject, seed=seed, steps=steps, every=every, formats=FORMATS
                )
    return found


def main() -> None:
    torch.set_num_threads(1)
    publish("fragility_training", tracking(runs(steps=61, every=12)))
    torch.manual_seed(0)
    subject = tiny_vit(32, digits, image=8, channels=1)
    series = list(looks(subject, seed=0, steps=120, every=1, formats=("fp16",)))
    publish("fragility_lead", [{"series": "κ_softmax → fp16 error", **leading(series)}])


if __name__ == "__main__":
    main()
