"""Whole models: our prediction, v1's and v2's beside the measured error, by module."""

import math
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from benchmarks.fragility_subjects import minilm, trained_gpt, trained_vit
from benchmarks.table import publish
from equipoise.auditing.precision.emulation import Bench, Storage, only
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.subject import Batch
from equipoise_lab.studies.fragility.published import published_blocks

Subject = tuple[nn.Module, Batch, list[nn.Module], str]


def subjects() -> dict[str, Subject]:
    bert, text = minilm()
    gpt, ids = trained_gpt()
    vit, images = trained_vit()
    return {
        "MiniLM": (bert, text, list(bert.encoder.layer), "encoder.layer."),
        "lab GPT": (gpt, ids, list(gpt.blocks), "blocks."),
        "lab ViT": (vit, images, list(vit.blocks), "blocks."),
    }


def rank(a: list[float], b: list[float]) -> float:
    return float(spearmanr(a, b).statistic)


def row(name: str, subject: Subject, format: str) -> dict[str, Any]:
    model, batch, blocks, prefix = subject
    storage, bench = Storage.named(format), Bench(model, batch)
    found = predicted(model, batch, storage=storage, probes=2)
    alone = bench.by_module(storage)
    sites = [s for s in alone if alone[s] > 1e-12]
    # The papers rank blocks only: compare all three there as well.
    inside = [
        [s for s in sites if f"{s}.".startswith(f"{prefix}{i}.")]
        for i in range(len(blocks))
    ]
    truth = [bench.mismatch(storage, narrow=only(set(b))) for b in inside]
    ours = [math.sqrt(sum(found.by_module[s] ** 2 for s in b)) for b in inside]
    paper = published_blocks(model, batch)
    total = bench.mismatch(storage)
    ratios = torch.tensor([alone[s] / found.by_module[s] for s in sites])
    return {
        "model": name,
        "format": format,
        "modules": len(sites),
        "measured": total,
        "measured/ours": total / found.total,
        "measured/v1": total / paper.v1_prediction(storage.format),
        "measured/v2": total / paper.v2_prediction(storage.format),
        "measured/u": total / storage.format.unit_roundoff,
        "ρ modules": rank(
            [found.by_module[s] for s in sites], [alone[s] for s in sites]
        ),
        "p5": ratios.quantile(0.05).item(),
        "p95": ratios.quantile(0.95).item(),
        "ρ blocks ours": rank(ours, truth),
        "ρ blocks v1": rank([b.predictor for b in paper.v1], truth),
        "ρ blocks v2": rank(paper.v2_risks, truth),
        "ρ blocks index": rank([float(i) for i in range(len(blocks))], truth),
    }


def main() -> None:
    rows = [
        row(name, subject, format)
        for name, subject in subjects().items()
        for format in ("fp16", "bf16", "e4m3", "e5m2")
    ]
    publish("fragility_models", rows)


if __name__ == "__main__":
    main()
