"""Checks of mixtures of experts."""

from collections.abc import Iterable, Mapping, Sequence

from equipoise.judging.checks.registry import Violation, finds, violated
from equipoise.judging.facts import Facts

EXPECTED = 400
"""Tokens that an expert would have had by now if all had equally many. One that is
chosen twenty times less often than its share is missed by all of them once in
exp(20) = 5·10⁸ times (Poisson)."""

Counts = Mapping[str, Sequence[float]]


def _counts(facts: Facts) -> Counts:
    """Return router → tokens of each expert in one sampled step, over all ranks."""
    found: dict[str, list[float]] = {}
    for section in facts.each("experts"):
        for site, router in section.get("routers", {}).items():
            tokens = router["tokens"]
            before = found.get(site, [0.0] * len(tokens))
            found[site] = [a + b for a, b in zip(before, tokens, strict=True)]
    return found


@finds("check.dead_experts")
def dead_experts(facts: Sequence[Facts]) -> Iterable[Violation] | None:
    """Experts without a token over the latest samples, once chance cannot explain it.

    Looks back no further than it must: an expert that came to life is no longer dead.
    """
    found, decided = [], False
    for site in _counts(facts[-1]):
        total: list[float] = []
        for sample in reversed(facts):
            tokens = _counts(sample).get(site, ())
            if total and len(tokens) != len(total):
                break
            total = total or [0.0] * len(tokens)
            total = [a + b for a, b in zip(total, tokens, strict=True)]
            if sum(total) >= EXPECTED * len(total):
                break
        experts = len(total)
        if not experts or not sum(total) >= EXPECTED * experts:
            continue
        decided = True
        dead = [e for e, tokens in enumerate(total) if tokens == 0]
        if dead:
            found.append(
                violated(
                    site,
                    count=len(dead),
                    experts=experts,
                    first=dead[0],
                    tokens=round(sum(total)),
                )
            )
    return found if decided else None
