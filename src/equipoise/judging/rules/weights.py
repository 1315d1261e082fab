"""Weights of a checkpoint: what is wrong with them, and where.

These rules read what ``auditing.weights`` measured, as readings of one step. Each finds
every place it is true of. Layers are compared with their like: tensors whose names
differ in numbers only.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from equipoise.judging.history import History
from equipoise.judging.rules.registry import Measured, measured, measures

OUTLIER = 4.0
"""Factor between a map's size and that of its like in other layers; the largest in
MiniLM is 1.45, and none of 89 zoo models at initialisation is named."""
SCATTERS = 6.0
"""… and so many times the usual scatter between layers, as a median deviation."""
LIKE = 3
"""Other layers needed for a comparison."""
RANDOM = (1.08, 1.35)
"""σ₁ over its value for random entries, and scatter of row and column norms over
theirs: below both, entries are as if drawn independently."""
TRAINED = 1.6
"""Scatter of a map that training has shaped; MiniLM's least is 2.43."""
PLANNED = (1 / 20, 5.0)
"""Initial scales in use over the planned one: T5's queries start at 1/6 of it."""
MARGIN = 0.5
"""Cosine with another layer's old weights above that with its own."""


def role(name: str) -> str:
    """Return a name with its numbers taken out: the same part of every layer.

    >>> role("h.11.attn.c_attn.weight[q]")
    'h.*.attn.c_attn.weight[q]'
    """
    return re.sub(r"\d+", "*", name)


def layer_of(name: str) -> str:
    """Return a name up to its first number, that included.

    >>> layer_of("encoder.layer.3.attention.self"), layer_of("wte.weight")
    ('encoder.layer.3', '')
    """
    found = re.match(r"^(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else ""


def by_role(names: Iterator[str] | Mapping[str, object]) -> dict[str, list[str]]:
    """Return the names of each role, in the order of the model."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(role(name), []).append(name)
    return groups


@measures("weights.nonfinite")
def nonfinite(history: History) -> Iterator[Measured]:
    """Entries of a tensor that are NaN or infinite."""
    for name, (count,) in history.table("weights.nonfinite").items():
        yield measured(count, name)


def _log(value: float) -> float:
    return math.log(max(value, 1e-300))


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """Return the median logarithm, and the median deviation from it as a σ."""
    logs = [_log(v) for v in values]
    middle = median(logs)
    return middle, 1.4826 * median(abs(x - middle) for x in logs)


def _away(history: History) -> dict[str, float]:
    """Return how far each map's size is from its like, in ln; 0 within the scatter.

    A map with a partner is judged by the product of both sizes: one may be scaled and
    the other divided, and the model is the same.
    """
    both = history.table("weights.map.rms") | history.table("weights.pair.rms")
    sizes = {name: values[0] for name, values in both.items()}
    away = dict.fromkeys(sizes, 0.0)
    for names in by_role({n: s for n, s in sizes.items() if math.isfinite(s)}).values():
        if len(names) <= LIKE:
            continue
        usual, scatter = _usual([sizes[name] for name in names])
        for name in names:
            distance = _log(sizes[name]) - usual
            away[name] = distance if abs(distance) > SCATTERS * scatter else 0.0
    gains = _gains_away(history)
    return {
        name: 0.0 if _in_a_gain(distance, gains.get(layer_of(name), ())) else distance
        for name, distance in away.items()
    }


def _gains_away(history: History) -> dict[str, list[float]]:
    """Return, by layer, how far each norm's gain is from its like, in ln."""
    gains = {n: v[0] for n, v in history.table("weights.gain").items() if v[0] > 0}
    away: dict[str, list[float]] = {}
    for names in by_role(gains).values():
        middle = median(_log(gains[name]) for name in names)
        for name in names:
            away.setdefault(layer_of(name), []).append(_log(gains[name]) - middle)
    return away


def _in_a_gain(distance: float, gains: Sequence[float]) -> bool:
    """Whether a gain of the layer has the inverse factor: then the map reads the norm.

    Queries and keys both read it, so the factor is in their product twice.
    """
    near = math.log(1.5)
    return abs(distance) > near and any(
        abs(distance + times * gain) < near for gain in gains for times in (1, 2)
    )


def _off(away: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the layers of which at least half of the maps are off, and which maps."""
    layers: dict[str, list[str]] = {}
    for name in away:
        layers.setdefault(layer_of(name), []).append(name)
    off = {
        layer: [name for name in names if abs(away[name]) > math.log(OUTLIER)]
        for layer, names in layers.items()
        if layer
    }
    return {
        layer: names
        for layer, names in off.items()
        if len(names) > 1 and 2 * len(names) >= len(layers[layer])
    }


def _times(ln: float) -> float:
    return math.exp(min(abs(ln), 700.0))


@measures("weights.outlier_layer")
def outlier_layer(history: History) -> Iterator[Measured]:
    """Factor between a layer's maps and their like, where half of its maps are off."""
    away = _away(history)
    for layer, names in _off(away).items():
        factor = median(away[name] for name in names)
        maps = sum(layer_of(name) == layer for name in away)
        yield measured(
            _times(factor),
            layer,
            factor=math.exp(min(factor, 700.0)),
            off=len(names),
            maps=maps,
        )


@measures("weights.scale")
def scale(history: History) -> Iterator[Measured]:
    """Factor between a map's size and its like in other layers, past their scatter."""
    away = _away(history)
    told = {name for names in _off(away).values() for name in names}
    told |= _less_off(history)
    for name, distance in away.items():
        if name not in told:
            factor = math.exp(min(distance, 700.0))
            yield measured(_times(distance), name, factor=factor)


def _less_off(history: History) -> set[str]:
    """Return of each pair of maps the one whose own size is nearer to its like."""
    sizes = {n: v[0] for n, v in history.table("weights.map.rms").items()}
    usual: dict[str, float] = {}
    for names in by_role(sizes).values():
        middle = median(_log(sizes[name]) for name in names)
        usual |= {name: abs(_log(sizes[name]) - middle) for name in names}
    pairs: dict[tuple[str, float], list[str]] = {}
    for name, (product,) in history.table("weights.pair.rms").items():
        pairs.setdefault((layer_of(name), product), []).append(name)
    nearer = set[str]()
    for names in pairs.values():
        nearer |= set(names) - {max(names, key=lambda name: usual.get(name, 0.0))}
    return nearer


@measures("weights.dead_head")
def dead_head(history: History) -> Iterator[Measured]:
    """Norm of a head's product of maps over the median head's."""
    for pair in ("vo", "qk"):
        table = history.table(f"projection.{pair}")
        heads = [value for row in table.values() for value in row]
        usual = median(heads) if heads else 0.0
        for site, row in table.items():
            for head, norm in enumerate(row):
                value = norm / usual if usual > 0 else 0.0
                yield measured(value, site, head=head, norm=norm, case=pair)


@measures("weights.same_heads")
def same_heads(history: History) -> Iterator[Measured]:
    """Least cosine over its maps between a head and the one it resembles most."""
    nearest = history.table("weights.head.nearest")
    for site, row in history.table("weights.head.likeness").items():
        for head, cosine in enumerate(row):
            other = int(nearest[site][head])
            if head < other or nearest[site][other] != head:
                yield measured(cosine, site, head=head, other=other, cosine=cosine)


@measures("weights.outlier_head")
def outlier_head(history: History) -> Iterator[Measured]:
    """‖W_Q W_Kᵀ‖ of a head over the median head's, beyond their scatter."""
    table = history.table("projection.qk")
    heads = [value for row in table.values() for value in row]
    if len(heads) < 2 * LIKE:
        return
    usual, scatter = _usual(heads)
    for site, row in table.items():
        # A whole layer that is off is found by its maps.
        if median(_log(v) for v in row) > usual + math.log(OUTLIER):
            continue
        for head, norm in enumerate(row):
            if _log(norm) > usual + SCATTERS * scatter:
                yield measured(norm / math.exp(usual), site, head=head, norm=norm)


@measures("weights.epsilon")
def epsilon(history: History) -> Iterator[Measured]:
    """Smallest normal number of the weights' format over ε as it stores it."""
    lost: dict[tuple[float, float, float], list[str]] = {}
    for name, (given, stored, tiny) in history.table("weights.epsilon").items():
        lost.setdefault((given, stored, tiny), []).append(name)
    for (given, stored, tiny), names in lost.items():
        yield measured(
            tiny / stored if stored else math.inf,
            names[0],
            norms=len(names),
            epsilon=given,
            stored=stored,
            case="subnormal" if stored else "none",
        )


@measures("weights.subnormal")
def subnormal(history: History) -> Iterator[Measured]:
    """Share of a tensor's entries below the format's normal numbers."""
    for name, (share,) in history.table("weights.subnormal").items():
        yield measured(share, name, share=share)


@measures("weights.half_loaded")
def half_loaded(history: History) -> Iterator[Measured]:
    """Tensors of a layer as at initialisation beside trained ones of their like."""
    constant = _fresh_vectors(history)
    layers: dict[str, list[str]] = {}
    for name in (*_fresh_maps(history), *constant):
        layers.setdefault(layer_of(name) or name, []).append(name)
    for layer, names in layers.items():
        value = constant.get(names[0])
        yield measured(
            len(names),
            layer,
            tensors=len(names),
            such=names[0],
            constant=value,
            case="map" if value is None else "vector",
        )


def _fresh_maps(history: History) -> Iterator[str]:
    edges, spreads = history.table("weights.edge"), history.table("weights.spread")
    shaped = _trained_layers(spreads)
    for names in by_role(edges).values():
        fresh = [n for n in names if is_random(edges[n][0], spreads[n])]
        trained = [n for n in names if layer_of(n) in shaped and n not in fresh]
        # One in between speaks for a short training, not for a failed loading.
        if trained and len(fresh) + len(trained) == len(names):
            yield from fresh


def _trained_layers(spreads: Mapping[str, tuple[float, ...]]) -> set[str]:
    """Return layers most of whose maps training has shaped: one may be a fault."""
    layers: dict[str, list[bool]] = {}
    for name, spread in spreads.items():
        layers.setdefault(layer_of(name), []).append(max(spread) > TRAINED)
    return {layer for layer, maps in layers.items() if 2 * sum(maps) > len(maps)}


def is_random(edge: float, spread: Sequence[float]) -> bool:
    """Whether a map looks like independent random entries."""
    return edge < RANDOM[0] and max(spread) < RANDOM[1]


def _fresh_vectors(history: History) -> dict[str, float]:
    """Vectors that are exactly constant (γ = 1, a bias of 0) where most like it vary.

    One that moved among many that did not is a choice of what to train.
    """
    found: dict[str, float] = {}
    table = history.table("weights.constant")
    for names in by_role(table).values():
        fresh = [n for n in names if table[n][0]]
        if 0 < 2 * len(fresh) <= len(names):
            found |= {n: table[n][1] for n in fresh}
    return found


@measures("weights.initial_scale")
def initial_scale(history: History) -> Iterator[Measured]:
    """How far outside the scales in use the worst kind of map starts, as a factor."""
    factors = {n: factor for n, (factor,) in history.table("weights.plan").items()}
    usual = {
        kind: median(factors[name] for name in names)
        for kind, names in by_role(factors).items()
    }
    low, high = PLANNED
    beyond = {kind: max(low / max(f, 1e-300), f / high) for kind, f in usual.items()}
    worst = max(beyond, key=beyond.__getitem__, default=None)
    if worst is not None:
        yield measured(beyond[worst], worst, factor=usual[worst])


@measures("weights.swapped")
def swapped(history: History) -> Iterator[Measured]:
    """Maps of a layer that hold what another layer held in the other checkpoint."""
    match = history.table("weights.match")
    found: dict[tuple[str, str], int] = {}
    for names in by_role(match).values():
        for here, name in enumerate(names):
            best = max(range(len(names)), key=lambda j: match[name][j])
            if best != here and match[name][best] > match[name][here] + MARGIN:
                pair = layer_of(name), layer_of(names[best])
                found[pair] = found.get(pair, 0) + 1
    for (layer, other), maps in found.items():
        yield measured(maps, layer, other=other, maps=maps)


@measures("weights.missing")
def missing(history: History) -> Iterator[Measured]:
    """1 for a tensor that is in the other checkpoint only."""
    return (measured(1.0, name) for name in history.table("weights.missing"))


@measures("weights.reshaped")
def reshaped(history: History) -> Iterator[Measured]:
    """1 for a tensor that has another shape in the other checkpoint."""
    return (measured(1.0, name) for name in history.table("weights.reshaped"))
