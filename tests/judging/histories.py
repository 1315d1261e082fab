"""Made-up courses of training for rules to judge."""

import math
from collections.abc import Callable, Iterable, Sequence

from equipoise.judging.judge import Judge
from equipoise.judging.rules import RULES
from equipoise.records import Finding, Reading

BLOCKS = tuple(f"blocks.{i}" for i in range(4))
SITES = tuple(f"{block}.attention" for block in BLOCKS)
DETAILS = {"blocks": list(BLOCKS), "attention": list(SITES), "classes": 256}


def per_site(
    step: int, quantity: str, rows: Sequence[Sequence[float]], sites: Sequence[str]
) -> Reading:
    values = tuple(tuple(row) for row in rows)
    return Reading(step=step, quantity=quantity, sites=tuple(sites), values=values)


def falling(step: int) -> float:
    """Return the loss of a healthy run, with noise of 0.05 that repeats."""
    return 2.4 + 3.0 * math.exp(-step / 60) + 0.05 * math.sin(12.9898 * step)


def healthy(
    steps: int = 200,
    *,
    every: int = 10,
    loss: Callable[[int], float] = falling,
    theta: Callable[[int, int], float] = lambda step, head: 0.95,
    gradient: Callable[[int, int], float] = lambda step, layer: 0.3 - 0.02 * layer,
) -> Iterable[Reading]:
    """Yield a run of 4 layers with 4 heads each; give what is not healthy in it."""
    for step in range(steps):
        yield Reading.scalar(step, "loss", loss(step))
        if step % every:
            continue
        rows = [[theta(step, 4 * layer + h) for h in range(4)] for layer in range(4)]
        yield per_site(step, "attention.theta.p50", rows, SITES)
        norms = [[gradient(step, layer)] for layer in range(4)]
        yield per_site(step, "gradient.norm", norms, BLOCKS)


def judged(readings: Iterable[Reading]) -> tuple[Judge, list[Finding]]:
    """Return the judge at the end, and everything the rules found on the way."""
    judge = Judge(DETAILS, rules=tuple(r for r in RULES.values() if r.of == "run"))
    found = judge.add(readings)
    return judge, [f for f in found if f.code != "rules.unread"]


def names(found: Iterable[Finding]) -> set[str]:
    """Return the rules that fired, those that ended not counted."""
    return {f.code for f in found if not f.params.get("resolved")}
