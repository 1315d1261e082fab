"""Many ranks' shares of a step become one, the same on every rank."""

import math
from collections.abc import Sequence

from equipoise.records import Finding
from equipoise.watching.joining import joined
from equipoise.watching.light import NORM, NORM_PART, Entry
from equipoise.watching.message import Message


def combined(messages: Sequence[Message]) -> Message:
    """Return the step as all ranks together saw it."""
    return Message(
        table=joined([message.table for message in messages]),
        scalars=_scalars([message.scalars for message in messages]),
        findings=_findings([message.findings for message in messages]),
        # The slowest rank is the one everybody waits for.
        cost=max(message.cost for message in messages),
        plain=min(message.plain for message in messages),
    )


def _scalars(ranks: Sequence[list[Entry]]) -> list[Entry]:
    """Return the mean loss and the whole norm; else what the first rank says.

    A loss that is NaN on one rank is NaN: a mean over the others would hide it.
    """
    whole = {(step, name): value for step, name, value in ranks[0]}
    said: dict[tuple[int, str], list[float]] = {}
    for entries in ranks:
        for step, name, value in entries:
            said.setdefault((step, name), []).append(value)
    for (step, name), values in said.items():
        if name == "loss":
            whole[step, name] = sum(values) / len(values)
        elif name == NORM_PART:
            whole.pop((step, name), None)
            whole[step, NORM] = math.hypot(*values)
    return [(step, name, value) for (step, name), value in sorted(whole.items())]


def _findings(ranks: Sequence[list[Finding]]) -> list[Finding]:
    """Return each event once: where several ranks saw it, as the nearest witness did.

    A NaN born on one rank reaches the others through the averaged gradient, a step
    later through the weights; the rank that saw it first stood closest.
    """
    merged: dict[str, Finding] = {}
    for found in (finding for findings in ranks for finding in findings):
        is_nonfinite = found.rule.startswith("nonfinite.")
        key = "nonfinite" if is_nonfinite else f"{found.step} {found.rule} {found.site}"
        if key not in merged or _earlier(found, merged[key]):
            merged[key] = found
    return list(merged.values())


def _earlier(one: Finding, other: Finding) -> bool:
    order = ["nonfinite.update", "nonfinite.forward", "nonfinite.backward"]

    def place(finding: Finding) -> tuple[int, int]:
        known = finding.rule in order
        return finding.step, order.index(finding.rule) if known else len(order)

    return place(one) < place(other)
