"""Readings that follow from other readings, on the host, without the model."""

import math
from collections.abc import Iterable, Iterator

from equipoise.records import Reading

Table = dict[str, dict[str, tuple[float, ...]]]
"""quantity → site → values."""


def derived(step: int, readings: Iterable[Reading], blocks: list[str]) -> list[Reading]:
    """Return the step's derived readings; what cannot be derived is absent, never 0."""
    table = {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in readings}
    found = [*_gradients(table, blocks), *_sensitivities(table, blocks)]
    return [
        Reading(step=step, quantity=q, sites=tuple(v), values=tuple(v.values()))
        for q, v in found
        if v
    ]


def _gradients(
    table: Table, blocks: list[str]
) -> Iterator[tuple[str, dict[str, tuple[float, ...]]]]:
    norms = table.get("gradient.norm", {})
    if norms and "gradient.norm.total" not in table:
        total = math.sqrt(sum(v[0] ** 2 for v in norms.values()))
        yield "gradient.norm.total", {"": (total,)}
    if blocks and {blocks[0], blocks[-1]} <= norms.keys() and norms[blocks[-1]][0]:
        ratio = norms[blocks[0]][0] / norms[blocks[-1]][0]
        yield "gradient.first_to_last", {"": (ratio,)}


def _sensitivities(
    table: Table, blocks: list[str]
) -> Iterator[tuple[str, dict[str, tuple[float, ...]]]]:
    """S = θ·B̄²·G per attention site, with B̄ of its input and of its block's stream."""
    G, theta = table.get("projection.G", {}), table.get("attention.theta.mean", {})
    B_input, B_stream = table.get("attention.B", {}), table.get("residual.B", {})
    by_input: dict[str, tuple[float, ...]] = {}
    by_stream: dict[str, tuple[float, ...]] = {}
    for site in G.keys() & theta.keys():
        head = sum(theta[site]) / len(theta[site])
        block = next((b for b in blocks if f"{site}.".startswith(f"{b}.")), None)
        if site in B_input:
            by_input[site] = (head * B_input[site][0] ** 2 * G[site][0],)
        if block in B_stream:
            by_stream[site] = (head * B_stream[block][0] ** 2 * G[site][0],)
    yield "sensitivity.S", _in_order(by_input, G)
    yield "sensitivity.S_residual", _in_order(by_stream, G)


def _in_order(
    values: dict[str, tuple[float, ...]], like: dict[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    return {site: values[site] for site in like if site in values}
