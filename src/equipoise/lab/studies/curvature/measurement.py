"""Petrov's Figs 3–5 and 7–11 on our models, each group with its own parameters.

Axes, in this file:  N parameter · P picture cell.

In the paper the curves called feed-forward belong to the second LayerNorm, every group
has a batch of its own, and weights are measured in another norm than Hessians. Here one
held-out batch serves all, FF is the feed-forward's matrices, and both are spectral.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.auditing.curvature import Operator, extreme_eigenvalues, hessian, trace
from equipoise.errors import InputError
from equipoise.lab.studies.judges import Trained
from equipoise.numerics.spectra.estimate import Estimate, Search

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


def curvature(trained: Trained) -> dict[str, float]:
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


def entries(trained: Trained) -> dict[str, float]:
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
