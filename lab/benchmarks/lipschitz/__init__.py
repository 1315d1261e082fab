"""How tight each bound of attention is, on trained layers and random ones.

Ratio of a bound to the constant it bounds, in the bound's own norm. The constants are
found from below, from the Jacobian that autograd takes of the real module: block-∞ by
alternation over the worst queries and a few others, Frobenius by power iteration.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.table import publish
from equipoise.errors import InputError
from equipoise.theory.lipschitz.bound import Bound
from equipoise.theory.lipschitz.forward import attend
from equipoise.theory.lipschitz.local import local_paths
from equipoise_lab.theory.lipschitz.joint import block_norms, dual_rows, joint_rows
from equipoise_lab.theory.lipschitz.published import (
    castin_bound,
    emadi_local,
    yudin_local,
)
from lab.benchmarks.lipschitz import pitfall, truth
from lab.benchmarks.lipschitz.specimens import Specimen, minilm, random, trained

OURS = ("dual", "blocks", "joint", "local")
BARS = {"joint": 4.0, "blocks": 2.5}


def main() -> None:
    torch.manual_seed(0)
    rows = [measured(specimen) for specimen in specimens()]
    groups = [summary(rows, group) for group in ("random", "gpt", "minilm", "trained")]
    publish("lipschitz_groups", groups, bars=BARS)
    publish("lipschitz", rows, groups=groups, bars=BARS, rope_pitfall=pitfall.rows())


def specimens() -> Iterator[Specimen]:
    yield from random()
    yield from trained()
    yield from minilm()


def measured(s: Specimen) -> dict[str, Any]:
    """Return ratios to the truth, and how often a bound fell below it: never."""
    attended = attend(s.heads, s.x)
    n_QK = block_norms(attended)
    by_row = {
        "dual": dual_rows(attended, steps=s.steps).upper,
        "blocks": n_QK.sum(-1),
        "joint": joint_rows(attended),
        "local": local_paths(attended).total_HQ.sum(0),
    }
    queries = truth.worst_and_others(by_row["blocks"], count=s.queries)
    lower = truth.block_inf(s.f, s.x, queries)
    row: dict[str, Any] = {"group": s.group, "layer": s.name, "constant": max(lower)}
    row |= {k: float(by_row[k].max()) / max(lower) for k in OURS}
    row["below"] = sum(
        float(v[i]) < low * (1 - 1e-9)
        for v in by_row.values()
        for i, low in zip(queries, lower, strict=True)
    )
    row["emadi"] = ratio(lambda: emadi_local(s.heads, s.x), max(lower))
    return row | in_frobenius_norm(s, n_QK)


def in_frobenius_norm(s: Specimen, n_QK: torch.Tensor) -> dict[str, Any]:
    whole = truth.frobenius(s.f, s.x)
    radius = float(s.x.norm(dim=-1).max())
    tokens = len(s.x)
    return {
        "blocks fro": float(torch.linalg.matrix_norm(n_QK, ord=2)) / whole,
        "yudin fro": ratio(lambda: yudin_local(s.heads, s.x), whole),
        "castin fro": ratio(
            lambda: castin_bound(s.heads, radius=radius, tokens=tokens), whole
        ),
    }


def ratio(bound: Callable[[], Bound], constant: float) -> float | None:
    """Return bound / constant, or nothing where the theorem does not apply."""
    try:
        return bound().value / constant
    except InputError:
        return None


def summary(rows: list[dict[str, Any]], group: str) -> dict[str, Any]:
    """Return the median and worst ratio of each bound over a group of layers."""
    among = {"gpt", "minilm"} if group == "trained" else {group}
    chosen = [row for row in rows if row["group"] in among]
    found: dict[str, Any] = {"group": group, "layers": len(chosen)}
    for name in (*OURS, "emadi", "blocks fro", "yudin fro", "castin fro"):
        values = [row[name] for row in chosen if row[name] is not None]
        found[name] = statistics.median(values) if values else None
        found[f"{name} worst"] = max(values) if values else None
    return found | {"below": sum(row["below"] for row in chosen)}
