"""Attention: saturated, uniform, logits large or growing, entropy, sinks, heads.

Levels of single heads say nothing: healthy models that were trained for long have heads
whose θ is 1e-7. What tells is how many heads at once, how early and how fast.
"""

from collections.abc import Iterator
from statistics import median

from equipoise.forecast.history import History, by_site, finite
from equipoise.forecast.rules.registry import Measured, measured, rule
from equipoise.records import Reading

THETA, LOGIT = "attention.theta.p5", "attention.max_logit"
ENTROPY, SINK = "attention.entropy", "attention.sink"
CALIBRATED = "our calibration: python -m benchmarks.rules"


def heads(reading: Reading) -> list[float]:
    """Return the values of all heads of all layers."""
    return [value for row in reading.values for value in row]


def extreme(reading: Reading, *, largest: bool) -> tuple[str, int, float]:
    """Return the site, the head and the value of the largest or smallest one."""
    sign = 1 if largest else -1
    best: tuple[float, str, int, float] | None = None
    for site, row in by_site(reading):
        for head, value in enumerate(row):
            if best is None or sign * value > best[0]:
                best = sign * value, site, head, value
    return ("", 0, float("nan")) if best is None else best[1:]


@rule(
    "attention.saturated",
    reads=THETA,
    below=0.1,
    release=0.2,
    persist=3,
    scope="layer",
    source="six long-trained healthy models: the median head's θ.p5 is 0.3–1; "
    + CALIBRATED,
    message="attention is saturated: half of the {heads} heads have θ.p5 below "
    "{value:.2g}, the lowest in {site}; queries and keys hardly learn any more",
    remedies=("qk_norm", "learning_rate", "qk_clip", "temperature"),
)
def saturated(history: History) -> Measured | None:
    """Median over heads of θ.p5: half of all heads have 5 % of rows below it."""
    reading = history.last(THETA)
    values = finite(heads(reading)) if reading else []
    if reading is None or not values:
        return None
    lowest = min(by_site(reading), key=lambda pair: median(pair[1] or (1.0,)))[0]
    value = median(values)
    started = history.track(THETA).first[0]
    if history.is_continued and median(finite(heads(started)) or [1.0]) < 0.2:
        return None  # it came like that, and it works
    return measured(value, lowest, heads=len(values), lowest_head=min(values))


@rule(
    "attention.logits_large",
    reads=LOGIT,
    above=100.0,
    release=80.0,
    persist=3,
    severe=1e4,
    scope="head",
    source="Kimi K2 caps at 100 (arXiv 2507.20534); every run above 1e4 diverged "
    "(arXiv 2309.14322)",
    message="attention logits reach {value:.3g} in {site}, head {head}: softmax puts "
    "everything on one key",
    remedies=("qk_clip", "qk_norm", "soft_cap", "learning_rate"),
)
def logits_large(history: History) -> Measured | None:
    """The largest attention logit of any head."""
    reading = history.last(LOGIT)
    if reading is None:
        return None
    site, head, value = extreme(reading, largest=True)
    return measured(value, site, head=head)


@rule(
    "attention.logits_growing",
    reads=LOGIT,
    above=4.0,
    release=2.0,
    persist=3,
    scope="layer",
    source=CALIBRATED,
    message="attention logits grow fast: {value:.2g}-fold in {readings} readings, to "
    "{logit:.3g} in {site}",
    remedies=("qk_norm", "learning_rate", "qk_clip", "temperature"),
)
def logits_growing(history: History) -> Measured | None:
    """Largest logit now over that of 16 readings ago, or over 5 if that is more."""
    track = history.track(LOGIT)
    if track.count < 2:
        return None
    recent = list(track.recent)[-17:]
    site, _, now = extreme(recent[-1], largest=True)
    before = max(extreme(recent[0], largest=True)[2], 5.0)
    return measured(now / before, site, logit=now, readings=len(recent) - 1)


@rule(
    "attention.entropy_collapsed",
    reads=ENTROPY,
    below=0.15,
    release=0.25,
    persist=3,
    scope="layer",
    source="entropy collapse precedes divergence (arXiv 2303.06296); " + CALIBRATED,
    message="attention entropy has collapsed: the median head is at {value:.2g} of "
    "where it began ({entropy:.2g} nats), the lowest in {site}",
    remedies=("sigma_reparam", "qk_norm", "learning_rate"),
)
def entropy_collapsed(history: History) -> Measured | None:
    """Median entropy over heads, over what it was at the first sample."""
    track = history.track(ENTROPY)
    if track.count < 2:
        return None
    now, first = finite(heads(track.recent[-1])), finite(heads(track.first[0]))
    began = median(first) if first else 0.0
    if not now or began <= 0:
        return None
    lowest = min(by_site(track.recent[-1]), key=lambda p: sum(p[1]) / len(p[1]))[0]
    return measured(median(now) / began, lowest, entropy=median(now), began=began)


@rule(
    "attention.uniform",
    reads=ENTROPY,
    above=0.98,
    release=0.95,
    persist=5,
    scope="layer",
    source="theory: a head at its largest entropy selects nothing; " + CALIBRATED,
    message="attention has gone back to uniform: the median head's entropy is "
    "{value:.3g} of its start, after it had fallen to {least:.2g} of it",
    remedies=("learning_rate", "temperature", "optimizer_reset"),
)
def uniform(history: History) -> Measured | None:
    """Median entropy over its start, once it had been below 0.9 of it."""
    track = history.track(ENTROPY)
    if track.count < 2:
        return None
    started = history.memory(
        "attention.uniform.start", lambda: median(heads(track.first[0]))
    )
    least = history.memory("attention.uniform", lambda: [1.0])
    if not started > 0:
        return None
    value = median(heads(track.recent[-1])) / started
    least[0] = min(least[0], value)
    return measured(value if least[0] < 0.8 else 0.0, least=least[0])


@rule(
    "attention.sinks",
    reads=SINK,
    above=0.8,
    release=0.7,
    persist=5,
    severity="info",
    scope="layer",
    source="trained language models put much mass on the first token without harm; "
    "most heads at once is rare",
    message="the median head puts {value:.0%} of its mass on the first key, the most "
    "in {site}: usual in trained language models, wasteful in new ones",
    remedies=("normaliser",),
)
def sinks(history: History) -> Measured | None:
    """Median over heads of the mass on the first key."""
    reading = history.last(SINK)
    values = finite(heads(reading)) if reading else []
    if reading is None or not values:
        return None
    site, head, _ = extreme(reading, largest=True)
    return measured(median(values), site, head=head)


@rule(
    "attention.dead_heads",
    reads=("attention.theta.p100",),
    above=0.25,
    release=0.15,
    persist=5,
    scope="head",
    source="theory: θ bounds the softmax Jacobian, so Q and K get nothing; "
    + CALIBRATED,
    message="{count} of {heads} heads are dead: no row has θ above 0.001, the first in "
    "{site}, head {head}",
    remedies=("qk_clip", "qk_norm", "learning_rate"),
)
def dead_heads(history: History) -> Measured | None:
    """Share of heads in which even the best row passes no gradient to Q and K."""
    reading = history.last("attention.theta.p100")
    if reading is None:
        return None
    dead = [
        (s, h) for s, row in by_site(reading) for h, v in enumerate(row) if v < 1e-3
    ]
    count = len(heads(reading))
    if not count:
        return None
    site, head = dead[0] if dead else ("", 0)
    return measured(len(dead) / count, site, count=len(dead), heads=count, head=head)


@rule(
    "attention.duplicate_heads",
    reads=("attention.theta.mean", ENTROPY, LOGIT),
    above=0.0,
    persist=5,
    severity="info",
    scope="head",
    source="theory: heads with one and the same attention do the work of one",
    message="{count} of {heads} heads attend as another head of their layer does, the "
    "first in {site}, head {head}",
    remedies=("normaliser",),
)
def duplicate_heads(history: History) -> Measured | None:
    """Share of heads whose θ, entropy and largest logit equal another's to 1e-4."""
    names = ("attention.theta.mean", ENTROPY, LOGIT)
    readings = [history.last(name) for name in names]
    if any(reading is None for reading in readings):
        return None
    rows = [dict(by_site(reading)) for reading in readings if reading is not None]
    found = [
        (site, head)
        for site in rows[0]
        if all(site in row for row in rows)
        for head in _repeated([row[site] for row in rows])
    ]
    count = sum(len(row) for row in rows[0].values())
    site, head = found[0] if found else ("", 0)
    share = len(found) / count if count else 0.0
    return measured(share, site, count=len(found), heads=count, head=head)


def _repeated(columns: list[tuple[float, ...]]) -> Iterator[int]:
    """Yield heads that come again later in the layer."""
    seen: set[tuple[str, ...]] = set()
    for head, values in enumerate(zip(*columns, strict=False)):
        key = tuple(f"{value:.4g}" for value in values)
        if key in seen:
            yield head
        seen.add(key)
