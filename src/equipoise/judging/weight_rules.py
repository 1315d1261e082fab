"""Rules over the weights of a checkpoint: what is wrong with them, and where.

They read what ``auditing.weights`` measured, as readings of one step, and see no
tensor. Unlike a rule over a run, one of these finds every place it is true of. Layers
are compared with their like: tensors whose names differ in numbers only.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from equipoise.judging.remedy_catalogue import advise
from equipoise.records import Finding, Reading, Severity

Table = Mapping[str, tuple[float, ...]]
"""Site → values of one quantity."""
Tables = Mapping[str, Table]
MOST = 40
"""Findings of one rule that are listed; the rest are counted."""
OUTLIER = 4.0
"""Factor between a map's size and that of its like in other layers; the largest in
MiniLM is 1.45, and none of 89 zoo models at initialisation is named."""
SCATTERS = 6.0
"""… and so many times the usual scatter between layers, as a median deviation."""
LIKE = 3
"""Other layers needed for a comparison."""
DEAD = 1e-3
"""Of the median head's norm. Trained heads of MiniLM span a factor of 14."""
SAME = 0.99
"""Least cosine of the maps of two heads. Heads of MiniLM reach 0.012."""
LOUD = 30.0
"""Factor of a head's ‖W_Q W_Kᵀ‖ above the median; MiniLM's largest is 8."""
RANDOM = (1.08, 1.35)
"""σ₁ over its value for random entries, and scatter of row and column norms over
theirs: below both, entries are as if drawn independently."""
TRAINED = 1.6
"""Scatter of a map that training has shaped; MiniLM's least is 2.43."""
UNDERFLOW = 0.5
"""Share of a tensor's entries that are subnormal."""


def weight_findings(readings: Sequence[Reading]) -> list[Finding]:
    """Return everything wrong with a checkpoint, the gravest first."""
    tables = {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in readings}
    found: list[Finding] = []
    for find in FINDERS:
        one = list(find(tables))
        found += one[:MOST]
        if len(one) > MOST:
            more = f"{len(one) - MOST} more of {one[0].code}"
            found.append(_finding("weights.more", "", more, severity=one[0].severity))
    order = {"error": 0, "warn": 1, "info": 2}
    return sorted(found, key=lambda f: order[f.severity])


def _finding(
    rule: str, site: str, message: str, *, severity: Severity = "warn", **more: Any
) -> Finding:
    found = Finding.warn(0, rule, message, site=site, **more)
    return replace(found, severity=severity)


def role(name: str) -> str:
    """Return a name with its numbers taken out: the same part of every layer.

    >>> role("h.11.attn.c_attn.weight[q]")
    'h.*.attn.c_attn.weight[q]'
    """
    return re.sub(r"\d+", "*", name)


def _nonfinite(tables: Tables) -> Iterator[Finding]:
    for name, (count,) in tables.get("weights.nonfinite", {}).items():
        if count:
            yield _finding(
                "weights.nonfinite",
                name,
                f"{name} has non-finite entries ({count:.0f})",
                severity="error",
                advice=advise(["roll_back"]),
                nonfinite=count,
            )


def _outliers(tables: Tables) -> Iterator[Finding]:
    """A map many times larger or smaller than its like in the other layers."""
    sizes = {n: v[0] for n, v in tables.get("weights.map.rms", {}).items()}
    wrong: dict[str, float] = {}
    for group in _groups(sizes).values():
        if len(group) > LIKE:
            usual, scatter = _usual(list(group.values()))
            limit = max(math.log(OUTLIER), SCATTERS * scatter)
            for name, size in group.items():
                away = _log(size) - usual
                if abs(away) > limit:
                    wrong[name] = math.exp(min(away, 700.0))
    yield from _by_layer(wrong, sizes)


def _by_layer(wrong: dict[str, float], sizes: dict[str, float]) -> Iterator[Finding]:
    """Name a layer once where most of its maps are off, and single maps otherwise."""
    layers: dict[str, list[str]] = {}
    for name in wrong:
        layers.setdefault(layer_of(name), []).append(name)
    for layer, names in layers.items():
        maps = sum(layer_of(name) == layer for name in sizes)
        if layer and len(names) > 1 and 2 * len(names) >= maps:
            factor = math.exp(median(map(_log, (wrong[n] for n in names))))
            yield _finding(
                "weights.outlier_layer",
                layer,
                f"{layer}: {len(names)} of {maps} maps are {_times(factor)} their "
                "like in the other layers",
                advice="look for a scale applied twice or not at all to this layer; "
                + advise(["residual_scale"]),
                factor=factor,
            )
            continue
        for name in names:
            yield _finding(
                "weights.scale",
                name,
                f"{name} is {_times(wrong[name])} its like in the other layers",
                advice="look for a scale applied twice or not at all to this map",
                factor=wrong[name],
            )


def _times(factor: float) -> str:
    if factor <= 1e-30:
        return "zero, unlike"
    return f"{factor:.3g} times" if factor >= 1 else f"1/{1 / factor:.3g} of"


def layer_of(name: str) -> str:
    """Return a name up to its first number, that included.

    >>> layer_of("encoder.layer.3.attention.self"), layer_of("wte.weight")
    ('encoder.layer.3', '')
    """
    found = re.match(r"^(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else ""


def _groups(sizes: Mapping[str, float]) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for name, size in sizes.items():
        if math.isfinite(size):
            groups.setdefault(role(name), {})[name] = size
    return groups


def _usual(values: list[float]) -> tuple[float, float]:
    """Return the median logarithm, and the median deviation from it as a σ."""
    logs = [_log(v) for v in values]
    middle = median(logs)
    return middle, 1.4826 * median(abs(x - middle) for x in logs)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _dead_heads(tables: Tables) -> Iterator[Finding]:
    for quantity, why in (
        ("projection.vo", "writes nothing: W_V W_O is zero beside the other heads'"),
        ("projection.qk", "attends alike to all: W_Q W_Kᵀ is zero beside the others'"),
    ):
        heads = [v for row in tables.get(quantity, {}).values() for v in row]
        limit = DEAD * median(heads) if heads else 0.0
        for site, row in tables.get(quantity, {}).items():
            for head, value in enumerate(row):
                if value <= limit:
                    yield _finding(
                        "weights.dead_head",
                        site,
                        f"{site} head {head} {why}",
                        advice="prune it, or start it again from another head's maps",
                        head=head,
                        norm=value,
                    )


def _same_heads(tables: Tables) -> Iterator[Finding]:
    nearest = tables.get("weights.head.nearest", {})
    for site, row in tables.get("weights.head.likeness", {}).items():
        for head, cosine in enumerate(row):
            other = int(nearest[site][head])
            if cosine > SAME and (head < other or nearest[site][other] != head):
                yield _finding(
                    "weights.same_heads",
                    site,
                    f"{site} heads {head} and {other} hold the same maps "
                    f"(cosine {cosine:.4f})",
                    advice="start one of them again; two equal heads stay equal",
                    head=head,
                    other=other,
                    cosine=cosine,
                )


def _loud_heads(tables: Tables) -> Iterator[Finding]:
    table = tables.get("projection.qk", {})
    heads = [v for row in table.values() for v in row]
    if len(heads) < 2 * LIKE:
        return
    usual, scatter = _usual(heads)
    limit = usual + max(math.log(LOUD), SCATTERS * scatter)
    for site, row in table.items():
        # A whole layer that is off is found by its maps.
        if median(_log(v) for v in row) > usual + math.log(OUTLIER):
            continue
        for head, value in enumerate(row):
            if _log(value) > limit:
                yield _finding(
                    "weights.outlier_head",
                    site,
                    f"{site} head {head}: ‖W_Q W_Kᵀ‖ is {value:.4g}, "
                    f"{value / math.exp(usual):.3g} times the median head's",
                    advice=advise(["qk_clip", "qk_norm"]),
                    head=head,
                    norm=value,
                )


def _epsilon(tables: Tables) -> Iterator[Finding]:
    lost: dict[tuple[float, float], list[str]] = {}
    for name, (epsilon, stored, tiny) in tables.get("weights.epsilon", {}).items():
        if stored < tiny:
            lost.setdefault((epsilon, stored), []).append(name)
    for (epsilon, stored), names in lost.items():
        more = f" and {len(names) - 1} other norms" if len(names) > 1 else ""
        yield _finding(
            "weights.epsilon",
            names[0],
            f"{names[0]}{more}: ε = {epsilon:g} is stored as {stored:.3g} in the "
            "format of the weights; a norm that runs in it has "
            + ("no ε at all" if stored == 0 else "a subnormal ε"),
            severity="warn" if stored == 0 else "info",
            advice=advise(["layer_norm_epsilon"]) + "; or keep norms in float32",
            epsilon=epsilon,
            stored=stored,
        )


def _subnormal(tables: Tables) -> Iterator[Finding]:
    for name, (share,) in tables.get("weights.subnormal", {}).items():
        if share > 0.01:
            yield _finding(
                "weights.subnormal",
                name,
                f"{share:.0%} of {name} is below the format's normal numbers",
                severity="warn" if share > UNDERFLOW else "info",
                advice="store it in bfloat16 or float32, or scale it",
                share=share,
            )


def _half_loaded(tables: Tables) -> Iterator[Finding]:
    """Maps, gains and biases as at initialisation beside trained ones of their like."""
    places = {**_fresh_maps(tables), **_fresh_vectors(tables)}
    layers: dict[str, list[str]] = {}
    for name in places:
        layers.setdefault(layer_of(name) or name, []).append(name)
    for layer, names in layers.items():
        yield _finding(
            "weights.half_loaded",
            layer,
            f"{layer}: {len(names)} tensors are as at initialisation while those of "
            f"other layers are trained, such as {names[0]} ({places[names[0]]})",
            advice="load it again and look at the missing keys: "
            "load_state_dict(..., strict=True) names them",
            tensors=len(names),
        )


def _fresh_maps(tables: Tables) -> dict[str, str]:
    edges, spreads = tables.get("weights.edge", {}), tables.get("weights.spread", {})
    groups: dict[str, list[str]] = {}
    for name in edges:
        groups.setdefault(role(name), []).append(name)
    shaped = _trained_layers(spreads)
    found: dict[str, str] = {}
    for names in groups.values():
        fresh = [n for n in names if is_random(edges[n][0], spreads[n])]
        trained = [n for n in names if layer_of(n) in shaped and n not in fresh]
        # One in between speaks for a short training, not for a failed loading.
        if trained and len(fresh) + len(trained) == len(names):
            found |= dict.fromkeys(fresh, "independent random entries")
    return found


def _trained_layers(spreads: Table) -> set[str]:
    """Return layers most of whose maps training has shaped: one may be a fault."""
    layers: dict[str, list[bool]] = {}
    for name, spread in spreads.items():
        layers.setdefault(layer_of(name), []).append(max(spread) > TRAINED)
    return {layer for layer, maps in layers.items() if 2 * sum(maps) > len(maps)}


def is_random(edge: float, spread: Sequence[float]) -> bool:
    """Say whether a map looks like independent random entries."""
    return edge < RANDOM[0] and max(spread) < RANDOM[1]


def _fresh_vectors(tables: Tables) -> dict[str, str]:
    """Vectors that are exactly constant (γ = 1, a bias of 0) beside ones that vary."""
    found: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    table = tables.get("weights.constant", {})
    for name in table:
        groups.setdefault(role(name), []).append(name)
    for names in groups.values():
        fresh = [n for n in names if table[n][0]]
        if 0 < len(fresh) < len(names):
            found |= {n: f"exactly {table[n][1]:g} throughout" for n in fresh}
    return found


def _initial_scale(tables: Tables) -> Iterator[Finding]:
    """Initial weights against the plan for this depth and width."""
    factors: dict[str, list[float]] = {}
    for name, (factor,) in tables.get("weights.plan", {}).items():
        factors.setdefault(role(name), []).append(factor)
    usual = {name: median(values) for name, values in factors.items()}
    worst = max(usual, key=lambda n: abs(_log(usual[n])), default=None)
    if worst is not None and not PLANNED[0] < usual[worst] < PLANNED[1]:
        yield _finding(
            "weights.initial_scale",
            worst,
            f"{worst} starts at {_times(usual[worst])} the planned scale for its width",
            advice="initialise with the values of `equipoise plan`",
            factor=usual[worst],
        )


PLANNED = (1 / 20, 5.0)
"""Initial scales in use over the planned one: T5's queries start at 1/6 of it."""


def _swapped(tables: Tables) -> Iterator[Finding]:
    """Layers that hold what another layer held in the other checkpoint."""
    match = tables.get("weights.match", {})
    roles: dict[str, list[str]] = {}
    for name in match:
        roles.setdefault(role(name), []).append(name)
    found: dict[tuple[str, str], list[str]] = {}
    for names in roles.values():
        for here, name in enumerate(names):
            best = max(range(len(names)), key=lambda j: match[name][j])
            if best != here and match[name][best] > match[name][here] + MARGIN:
                pair = (layer_of(name), layer_of(names[best]))
                found.setdefault(pair, []).append(name)
    for (layer, other), names in found.items():
        yield _finding(
            "weights.swapped",
            layer,
            f"{layer} holds what {other} held in the other checkpoint "
            f"({len(names)} maps)",
            advice="compare the names under which the two were saved",
            other=other,
            maps=len(names),
        )


MARGIN = 0.5
"""Cosine with another layer's old weights above that with its own."""


def _differing(tables: Tables) -> Iterator[Finding]:
    for quantity, what in (
        ("weights.missing", "is in the other checkpoint only"),
        ("weights.reshaped", "has another shape in the other checkpoint"),
    ):
        for name in tables.get(quantity, {}):
            yield _finding(quantity, name, f"{name} {what}")


FINDERS: tuple[Callable[[Tables], Iterator[Finding]], ...] = (
    *(_nonfinite, _outliers, _dead_heads, _same_heads, _loud_heads, _epsilon),
    *(_subnormal, _half_loaded, _initial_scale, _swapped, _differing),
)
