"""Readings that follow from other readings, on the host, without the model."""

import math
from collections.abc import Iterable, Iterator

from equipoise.records import Reading

Values = dict[str, tuple[float, ...]]
"""site → values."""
Table = dict[str, Values]
"""quantity → site → values."""


def derived(step: int, readings: Iterable[Reading], blocks: list[str]) -> list[Reading]:
    """Return the step's derived readings; what cannot be derived is absent, never 0."""
    table = {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in readings}
    found = [
        *_gradients(table, blocks),
        *_updates(table),
        *_sensitivities(table, blocks),
    ]
    return [
        Reading(step=step, quantity=q, sites=tuple(v), values=tuple(v.values()))
        for q, v in found
        if v
    ]


def _gradients(table: Table, blocks: list[str]) -> Iterator[tuple[str, Values]]:
    norms = table.get("gradient.norm", {})
    if norms and "gradient.norm.total" not in table:
        total = math.sqrt(sum(v[0] ** 2 for v in norms.values()))
        yield "gradient.norm.total", {"": (total,)}
    if blocks and {blocks[0], blocks[-1]} <= norms.keys() and norms[blocks[-1]][0]:
        ratio = norms[blocks[0]][0] / norms[blocks[-1]][0]
        yield "gradient.first_to_last", {"": (ratio,)}


def _updates(table: Table) -> Iterator[tuple[str, Values]]:
    moved, size = table.get("update.norm", {}), table.get("weight.norm", {})
    here = [site for site in moved if site in size and size[site][0]]
    yield "update.ratio", {s: (moved[s][0] / size[s][0],) for s in here}


def _sensitivities(table: Table, blocks: list[str]) -> Iterator[tuple[str, Values]]:
    """S = θ·B̄²·G per attention site, with B̄ of its input and of its block's stream.

    The factors are kept as logarithms: their differences over time or over layers
    say which of them moved S.
    """
    G, theta = table.get("projection.G", {}), table.get("attention.theta.mean", {})
    streams = table.get("residual.B", {})
    mean = {site: sum(v) / len(v) for site, v in theta.items() if site in G}
    for name, B in (
        ("S", table.get("attention.B", {})),
        (
            "S_residual",
            {s: streams[b] for s in mean if (b := block_of(s, blocks)) in streams},
        ),
    ):
        here = [site for site in G if site in mean and site in B]
        S: Values = {s: (mean[s] * B[s][0] ** 2 * G[s][0],) for s in here}
        yield f"sensitivity.{name}", S
        yield f"sensitivity.{name}.ln_B2", {s: (2 * _ln(B[s][0]),) for s in here}
    yield "sensitivity.ln_theta", {s: (_ln(mean[s]),) for s in G if s in mean}
    yield "sensitivity.ln_G", {s: (_ln(G[s][0]),) for s in G if s in mean}


def block_of(site: str, blocks: list[str]) -> str:
    """Return the block a site lies in, or an empty name."""
    return next((b for b in blocks if f"{site}.".startswith(f"{b}.")), "")


def _ln(x: float) -> float:
    """Return ln x, with ln 0 = -inf: a dead factor is a reading, not an error."""
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)
