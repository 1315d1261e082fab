"""Curvature of each group of parameters: whose Hessian is largest, and when?

Petrov's Figs 3–5 and 7–11 on a ViT and a byte-level GPT, over training.

Axes, in this file:  N parameter · P picture cell.

In the paper the curves called feed-forward belong to the second LayerNorm, every group
has a batch of its own, and weights are measured in another norm than Hessians. Here one
held-out batch serves all, FF is the feed-forward's matrices, and both are spectral.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.auditing.curvature import Operator, extreme_eigenvalues, hessian, trace
from equipoise.errors import InputError
from equipoise.numerics.spectra.estimate import Estimate, Search
from equipoise_lab.data import DataOptions
from equipoise_lab.models import GPTConfig, vit_preset
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import corrected, paired, to_decide
from equipoise_lab.running.execution import TrainedModel
from equipoise_lab.running.experiment import FIVE_SEEDS, Arm, Experiment
from equipoise_lab.training.options import TrainOptions

GROUPS = {
    "Q": ("*.q_proj.*",),
    "K": ("*.k_proj.*",),
    "V": ("*.v_proj.*",),
    "O": ("*.o_proj.*",),
    "LN1": ("*.attention_norm.*",),
    "FF": ("*.up_proj.*", "*.down_proj.*"),
    "LN2": ("*.feedforward_norm.*",),
    "block": ("blocks.*",),
}
SEARCH = Search(tolerance=0.02, failure=None, at_most=80)
CELLS = 384
LOWEST, HIGHEST = -6.0, 1.5
"""log₁₀ of the smallest and the largest entry a picture tells apart, as the paper's."""


def measure(trained: TrainedModel) -> dict[str, float]:
    """Return spectral norms of the Hessian of each group, and of its weights."""
    whole = hessian(trained.model, trained.batch)
    found: dict[str, float] = {}
    for name, patterns in GROUPS.items():
        group = whole.block(*patterns)
        ends = extreme_eigenvalues(group, search=SEARCH)
        found[f"hessian_{name}"] = max(abs(e.value) for e in ends)
        found[f"negative_{name}"] = _negative(ends.smallest, ends.largest)
        found[f"weights_{name}"] = largest_matrix(group)
    found["trace_block"] = trace(whole.block("blocks.*"), probes=30).value
    return found


def _negative(smallest: Estimate, largest: Estimate) -> float:
    """Return how far the spectrum reaches below zero, as a share of its top."""
    return max(0.0, -smallest.value) / largest.value if largest.value > 0 else 1.0


def largest_matrix(group: Operator) -> float:
    """Return the largest spectral norm of a group's matrices; of vectors, if none."""
    matrices = [p for p in group.at if p.ndim >= 2]
    norms = [float(torch.linalg.matrix_norm(p.flatten(1), 2)) for p in matrices] or [
        float(p.norm()) for p in group.at
    ]
    return max(norms)


def entries(trained: TrainedModel) -> dict[str, float]:
    """Return the mean log₁₀ size of entries, group by group; leave a picture.

    Rows and columns go in the order of the groups: Q, K, V, O, LN1, FF, LN2.
    """
    if trained.folder is None:
        raise InputError("entries leaves a picture and needs a folder")
    names = [name for name in GROUPS if name != "block"]
    whole = hessian(trained.model, trained.batch)
    order = [n for g in names for n in whole.block(*GROUPS[g]).names]
    operator = whole.again(order)
    log_NN = operator.dense().abs().clamp(min=10**LOWEST).log10()
    write_picture(log_NN, trained.folder / "entries.png", edges=_edges(whole, names))
    at = _slices(whole, names)
    return {
        f"entries_{a}_{b}": float(log_NN[at[a], at[b]].mean())
        for i, a in enumerate(names)
        for b in names[: i + 1]
    }


def _slices(whole: Operator, names: list[str]) -> dict[str, slice]:
    edges = _edges(whole, names)
    return {
        name: slice(start, end)
        for name, start, end in zip(names, edges, edges[1:], strict=False)
    }


def _edges(whole: Operator, names: list[str]) -> list[int]:
    widths = [whole.block(*GROUPS[name]).width for name in names]
    return [0, *np.cumsum(widths).tolist()]


def write_picture(log_NN: Tensor, path: Path, *, edges: list[int]) -> None:
    """Write entries as a picture: dark is small, lines part the groups."""
    from PIL import Image

    N = len(log_NN)
    side = -(-N // CELLS)
    pooled_PP = torch.nn.functional.max_pool2d(
        log_NN.float()[None, None], side, ceil_mode=True
    )[0, 0]
    level_PP = ((pooled_PP - LOWEST) / (HIGHEST - LOWEST)).clamp(0, 1).numpy()
    pixels = _coloured(level_PP)
    for edge in edges[1:-1]:
        pixels[edge // side, :] = pixels[:, edge // side] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, optimize=True)


ANCHORS = ((12, 7, 60), (85, 15, 110), (187, 55, 84), (249, 142, 9), (252, 255, 164))


def _coloured(level_PP: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """Return colours from dark violet to pale yellow, even in lightness."""
    at = np.linspace(0, 1, len(ANCHORS))
    channels = [np.interp(level_PP, at, [a[c] for a in ANCHORS]) for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


VIT = replace(vit_preset("petrov-mnist"), image=8, patch=2)
"""The paper's block on digits of 8 × 8 pixels: 16 tokens."""
SMALL = [name for name in GROUPS if name != "block"]
GPT = GPTConfig(width=16, depth=1, heads=1, ffn_width=64, context=16)


def recipe(quick: bool) -> Experiment:
    """Which group's Hessian is largest, at the start and after training?

    A constant rate after warm-up makes shorter runs the beginning of longer ones; the
    arm at 0 takes one step too small to move a weight.
    """
    lengths = (0, 100) if quick else (0, 200, 400, 600, 800, 1000)
    arms = tuple(
        Arm(
            name=f"{kind}-{steps}",
            model=model,
            train=_train(steps),
            data=data,
            judges=("curvature", "entries")
            if steps in (lengths[0], lengths[-1])
            else ("curvature",),
        )
        for kind, model, data in (
            ("vit", VIT, DataOptions(source="digits")),
            ("gpt", GPT, DataOptions()),
        )
        for steps in lengths
    )
    return Experiment(
        name="curvature",
        question="Whose Hessian is largest, and does that change with training?",
        arms=arms[: len(lengths)] if quick else arms,
        seeds=(42,) if quick else FIVE_SEEDS,
        measures=(
            "validation",
            *(f"hessian_{name}" for name in GROUPS),
            *(f"negative_{name}" for name in ("FF", "LN2", "block")),
            *(f"weights_{name}" for name in SMALL),
            "trace_block",
            *(f"entries_{a}_{b}" for i, a in enumerate(SMALL) for b in SMALL[: i + 1]),
        ),
    )


def _train(steps: int) -> TrainOptions:
    still = steps == 0
    return TrainOptions(
        steps=max(1, steps),
        batch=64,
        lr=1e-12 if still else 1e-3,
        warmup=1 if still else 100,
        floor=1.0,
        weight_decay=0.0,
        watch=False,
    )


def finding(evidence: Evidence) -> StudyFinding:
    """Rank the groups at both ends of training, and show them on the way."""
    kinds = list(dict.fromkeys(arm.split("-")[0] for arm in evidence.runs))
    return StudyFinding(
        verdict=" ".join(_ranking(evidence, kind) for kind in kinds),
        grids=[
            *(_norms(evidence, kind) for kind in kinds),
            *(
                grid
                for kind in kinds
                for arm in ends(evidence, kind)
                if (grid := _entries_grid(evidence, arm)) is not None
            ),
        ],
        figures=[
            _figure(evidence, kind, what)
            for kind in kinds
            for what in ("hessian", "weights")
        ],
    )


def steps(evidence: Evidence, kind: str) -> list[int]:
    """Return the lengths of training of one model, ascending."""
    return sorted(
        int(arm.split("-")[1]) for arm in evidence.runs if arm.startswith(kind)
    )


def ends(evidence: Evidence, kind: str) -> list[str]:
    """Return the arms at the start and at the end of training."""
    lengths = steps(evidence, kind)
    return [f"{kind}-{at}" for at in dict.fromkeys((lengths[0], lengths[-1]))]


def _ranking(evidence: Evidence, kind: str) -> str:
    parts = []
    for arm in ends(evidence, kind):
        norms = {g: evidence.mean(arm, f"hessian_{g}") for g in SMALL}
        order = sorted(norms, key=norms.__getitem__, reverse=True)
        parts.append(", ".join(f"{g} {norms[g]:.3g}" for g in order))
    start, end = ends(evidence, kind)[0], ends(evidence, kind)[-1]
    grew = [
        g
        for g in SMALL
        if evidence.mean(end, f"hessian_{g}") > evidence.mean(start, f"hessian_{g}")
    ]
    ratio = evidence.mean(end, "hessian_FF") / evidence.mean(end, "hessian_LN2")
    return (
        f"{kind}, spectral norm of each group's Hessian at init: {parts[0]}; at the "
        f"end: {parts[-1]}. {_told_apart(evidence, kind)}{len(grew)} of {len(SMALL)} "
        "groups grew. At the end the "
        f"feed-forward's own Hessian is {ratio:.3g} times that of the second norm, "
        "which is what the paper plots under its name."
    )


def _told_apart(evidence: Evidence, kind: str) -> str:
    """Say from which groups the largest is told at the end, in ratios over seeds."""
    end = ends(evidence, kind)[-1]
    seeds = list(evidence.runs[end])
    if len(seeds) < 2:
        return ""
    logs = {
        g: [math.log(evidence.value(end, seed, f"hessian_{g}")) for seed in seeds]
        for g in SMALL
    }
    top = max(SMALL, key=lambda g: evidence.mean(end, f"hessian_{g}"))
    others = [g for g in SMALL if g != top]
    pairs = corrected([paired(logs[top], logs[g]) for g in others])
    near = [
        f"{g}{to_decide(pair)}"
        for g, pair in zip(others, pairs, strict=True)
        if pair is not None and not pair.p < 0.05
    ]
    rest = f"all others but {', '.join(near)}" if near else "all others"
    return f"{top} is told from {rest} (ratios over seeds, Holm over {len(others)}). "


def _norms(evidence: Evidence, kind: str) -> StudyGrid:
    arms = [f"{kind}-{at}" for at in steps(evidence, kind)]
    lines = [(f"‖H‖ of {g}", f"hessian_{g}") for g in GROUPS]
    lines += [("tr H of the block", "trace_block")]
    lines += [("−λ_min ÷ λ_max of the block", "negative_block")]
    lines += [(f"largest ‖W‖ in {g}", f"weights_{g}") for g in SMALL]
    return StudyGrid(
        title=f"{kind}: steps of training, mean over seeds",
        head=["", *(arm.split("-")[1] for arm in arms), "seeds"],
        cells=[
            [
                words,
                *(f"{evidence.mean(arm, name):.3g}" for arm in arms),
                str(len(evidence.runs[arms[0]])),
            ]
            for words, name in lines
        ],
    )


def _entries_grid(evidence: Evidence, arm: str) -> StudyGrid | None:
    """Return the mean log₁₀ entry of each pair of groups, where it was measured."""
    cells = [
        [a, *(f"{evidence.mean(arm, f'entries_{a}_{b}'):.2f}" for b in SMALL[: i + 1])]
        for i, a in enumerate(SMALL)
    ]
    if "nan" in cells[0]:
        return None
    return StudyGrid(
        title=f"{arm}: mean log₁₀ |entry| of the Hessian (10⁻⁶ is the floor)",
        head=["", *SMALL],
        cells=[[*row, *[""] * (len(SMALL) + 1 - len(row))] for row in cells],
    )


def _figure(evidence: Evidence, kind: str, what: str) -> Figure:
    lengths = steps(evidence, kind)
    words = {"hessian": "Hessian of each group", "weights": "Weights of each group"}
    return chart(
        f"{kind}-{what}",
        f"{words[what]}, {kind}: spectral norm",
        [
            FigureLine(
                name=g,
                x=lengths,
                y=[evidence.mean(f"{kind}-{at}", f"{what}_{g}") for at in lengths],
            )
            for g in SMALL
        ],
        x="step",
        log="y",
    )
