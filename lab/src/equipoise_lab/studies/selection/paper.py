"""Mudarisov's five algorithms on a trained model, every head, evenly spaced queries.

Axes, in this file:  B batch · H head · Q query · K key · D width · M all heads ·
T sizes tried.
The paper reads GPT-2 124M on *War and Peace*; x_i are value vectors here, as in the
authors' follow-up: the paper does not say.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.numerics.normalisers import rows
from equipoise.numerics.selection import (
    HeadMetricOptions,
    critical_top,
    published_sphere_recall,
    selection_of_heads,
    step_sensitivity,
)
from equipoise_lab.results.evidence import Evidence, rounded, surroundings
from equipoise_lab.studies.selection.reader import Reader, SelectionHeads, reader

NAME, RAW = "selection-paper", "raw.json"
QUERIES, QUICK_QUERIES = 64, 8
LENGTHS = (32, 64, 128, 256, 512, 1024)
FIRST = 5
SIZES = (1, 5, 10, 20, 100)
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TEMPERATURES = tuple(10.0**power for power in range(-3, 3))
STEPS = (1e-3, 1e-1, 10.0)
LEVEL = 0.01

Curve = dict[str, list[float]]


def paper(source: Reader, *, queries: int = QUERIES) -> Evidence:
    """Return the five algorithms' answers, as evidence a page is made from."""
    start = time.process_time()
    lengths = [n for n in LENGTHS if n <= source.longest]
    layers = {n: list(source.heads(n, queries=queries)) for n in lengths}
    longest = layers[lengths[-1]]
    curves = {
        "lengths": {"d̃": algorithm_1(layers)},
        "sizes": {"d̃": algorithm_2(longest)},
        "critical": {"N": algorithm_3(layers)},
        "separability": {"recall": algorithm_4(longest)},
        "gradient": algorithm_5(longest),
    }
    heads = sum(one.q_BHQD.shape[1] for one in longest)
    return Evidence(
        name=NAME,
        question="Do the limits of normalisation show on a trained model?",
        measures=(),
        seeds=(),
        arms={},
        baselines={},
        runs={},
        curves=curves,
        about={
            "command": f"equipoise lab run {NAME}",
            "model": source.name,
            "heads": heads,
            "queries": queries,
            "lengths": lengths,
            "cpu_minutes": rounded((time.process_time() - start) / 60),
            **surroundings(),
        },
        digits=None,
    )


def figures_of(model: str, root: Path, *, quick: bool = False) -> Evidence:
    """Return the figures of the model a string names, and keep them under ``root``."""
    found = paper(reader(model), queries=QUICK_QUERIES if quick else QUERIES)
    place = root / NAME / RAW
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(found.to_json(), encoding="utf-8")
    return found


def saved_figures(root: Path) -> Evidence | None:
    """Return what was kept the last time, if anything."""
    place = root / NAME / RAW
    if not place.is_file():
        return None
    return Evidence.from_json(place.read_text(encoding="utf-8"))


def read(one: SelectionHeads, wanted: HeadMetricOptions) -> dict[str, Tensor]:
    """Return a layer's readings: means over queries, by head."""
    found = selection_of_heads(
        one.q_BHQD,
        one.k_BGKD,
        one.v_BGKD,
        wanted=wanted,
        mask=one.seen_QK,
        scale=one.scale,
        normaliser=one.rule,
    )
    return found.per_head()


def _all(layers: list[SelectionHeads], wanted: HeadMetricOptions) -> dict[str, Tensor]:
    """Return readings of every head of the model: (M,) or (M, T)."""
    found = [read(one, wanted) for one in layers]
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


DISTANCES = {
    "true": "distance",
    "bound": "distance.upper",
    "lower": "distance.lower",
    "published": "distance.published",
    "expected_low": "distance.expected_lower",
    "expected_high": "distance.expected_upper",
}


def algorithm_1(layers: Mapping[int, list[SelectionHeads]]) -> Curve:
    """Return d̃ of the top 5, its bounds and its expectation, over the length."""
    wanted = HeadMetricOptions(tops=(FIRST,), separability=False, published=True)
    read = [_all(some, wanted) for some in layers.values()]
    return {"x": [float(n) for n in layers]} | {
        name: [one[key].nanmean().item() for one in read]
        for name, key in DISTANCES.items()
    }


def algorithm_2(layers: list[SelectionHeads]) -> Curve:
    """Return the same over the size of the selection, at the longest context."""
    K = layers[0].k_BGKD.shape[2]
    tops = tuple(n for n in SIZES if n < K)
    found = _all(
        layers, HeadMetricOptions(tops=tops, separability=False, published=True)
    )
    return {"x": [float(n) for n in tops]} | {
        name: found[key].nanmean(0).tolist() for name, key in DISTANCES.items()
    }


def algorithm_3(layers: Mapping[int, list[SelectionHeads]]) -> Curve:
    """Return per length the first N at which d̃ and E[d̃] are not told apart.

    E[d̃] is an interval: its lower end is the paper's main term. Both ends are tried;
    NaN where no size tried reaches the verdict.
    """
    found: Curve = {"x": [], "low": [], "high": [], "detectable": []}
    for length, some in layers.items():
        tops = [n for n in GRID if n <= length // 2]
        read = _all(some, HeadMetricOptions(tops=tuple(tops), separability=False))
        rng = torch.Generator().manual_seed(0)
        ends = [
            critical_top(
                read["distance"].mT,
                read[f"distance.expected_{end}"].mT,
                tops,
                generator=rng,
                level=LEVEL,
            )
            for end in ("lower", "upper")
        ]
        sizes = sorted(math.inf if one.top is None else one.top for one in ends)
        low, high = (math.nan if n == math.inf else float(n) for n in sizes)
        found["x"].append(float(length))
        found["low"].append(low)
        found["high"].append(high)
        found["detectable"].append(ends[0].detectable)
    return found


def algorithm_4(layers: list[SelectionHeads]) -> Curve:
    """Return N_s/N of unit tokens over heads, with its control and bounds."""
    K = layers[0].k_BGKD.shape[2]
    tops = tuple(2**i for i in range(9) if 2**i < K)
    unit = [replace(one, v_BGKD=F.normalize(one.v_BGKD, dim=-1)) for one in layers]
    found = _all(unit, HeadMetricOptions(tops=tops, distance=False, random=4))
    recall_MT = found["euclidean.recall"]
    quartiles = {
        name: recall_MT.nanquantile(q, 0).tolist()
        for name, q in (("low", 0.25), ("median", 0.5), ("high", 0.75))
    }
    bounds = [_sphere(one, tops) for one in unit]
    return {
        "x": [float(n) for n in tops],
        "mean": recall_MT.nanmean(0).tolist(),
        **quartiles,
        "random": found["random_euclidean.recall"].nanmean(0).tolist(),
        "cosine": found["cosine.recall"].nanmean(0).tolist(),
        "precision": found["euclidean.precision"].nanmean(0).tolist(),
        "published_low": torch.stack([b[0] for b in bounds]).nanmean(0).tolist(),
        "published_high": torch.stack([b[1] for b in bounds]).nanmean(0).tolist(),
    }


def _sphere(one: SelectionHeads, tops: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return Theorem 2's rebuilt bounds, δ and r as the paper's experiments set them.

    A few queries suffice: the bounds are means over all of them.
    """
    some = replace(one, q_BHQD=one.q_BHQD[:, :, -8:], seen_QK=one.seen_QK[-8:])
    H, G = some.q_BHQD.shape[1], some.k_BGKD.shape[1]
    x_HKD = some.v_BGKD[0].repeat_interleave(H // G, 0).double()
    w_HQK = _weights(some).double()
    apart_HKK = torch.cdist(x_HKD, x_HKD)
    apart_HKK += torch.eye(apart_HKK.shape[-1]) * 9
    order_HQK = w_HQK.sort(dim=-1, descending=True).indices
    low, high = [], []
    for top in tops:
        inside = torch.zeros_like(w_HQK, dtype=torch.bool)
        inside.scatter_(-1, order_HQK[..., :top], True)
        s_HQD = (w_HQK * inside) @ x_HKD
        y_HQKD = w_HQK[..., None] * x_HKD[:, None]
        far_HQK = (s_HQD[..., None, :] - y_HQKD).norm(dim=-1)
        outside = ~inside & some.seen_QK
        radius_HQ = far_HQK.masked_fill(~outside, math.inf).amin(-1)
        chosen_HQN = w_HQK.gather(-1, order_HQK[..., :top])
        gap = float(apart_HKK.amin((-2, -1)).mean())
        found = published_sphere_recall(chosen_HQN, radius_HQ, gap=gap)
        ready = outside.any(-1).expand_as(radius_HQ) & (radius_HQ > 0)
        low.append(found.lower[ready].mean())
        high.append(found.upper[ready].mean())
    return torch.stack(low), torch.stack(high)


def _scores(one: SelectionHeads, *, scale: float) -> Tensor:
    H, G = one.q_BHQD.shape[1], one.k_BGKD.shape[1]
    k_BHKD = one.k_BGKD.repeat_interleave(H // G, 1)
    z_BHQK = one.q_BHQD @ k_BHKD.mT * scale
    return z_BHQK[0].masked_fill(~one.seen_QK, -math.inf)


def _weights(one: SelectionHeads) -> Tensor:
    return one.rule.weights(rows(_scores(one, scale=one.scale)))


def algorithm_5(layers: list[SelectionHeads]) -> dict[str, dict[str, list[float]]]:
    """Return g(T, ε): mean over queries, largest over heads; T divides q·k itself."""
    rng = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, list[float]]] = {}
    for step in STEPS:
        line: Curve = {"x": list(TEMPERATURES), "y": [], "bound": [], "claimed": []}
        for T in TEMPERATURES:
            read = [
                step_sensitivity(
                    _scores(one, scale=1.0),
                    step=step,
                    generator=rng,
                    temperature=T,
                    normaliser=one.rule,
                )
                for one in layers
            ]
            line["y"].append(max(r.value.nanmean(-1).max().item() for r in read))
            line["bound"].append(read[0].bound)
            line["claimed"].append(min(1 / (4 * T), math.sqrt(2)))
        found[f"ε = {step:g}"] = line
    return found
