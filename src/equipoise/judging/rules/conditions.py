"""The engine: what a rule finds becomes a condition that begins, lasts and ends.

A condition is pending while its value is beyond the threshold, fires after ``persist``
readings in a row, and is over after ``recover`` readings in a row past ``release``.
Between the two limits nothing changes, so it does not flicker; a step at which the rule
cannot know (None) changes nothing, so missing data never end an alarm. A rule that
finds many places has a condition for each.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from equipoise.judging.history import History
from equipoise.judging.rules.registry import Measured, Rule, measured
from equipoise.records import Finding, Scalar, Severity

Phase = Literal["quiet", "pending", "firing"]
MOST = 40
"""Findings of one rule that are listed; the rest are counted."""
MORE, FAILED = "rules.more", "rule.failed"


@dataclass(slots=True, eq=False)
class Condition:
    """What a rule finds at one place of one run."""

    rule: Rule
    phase: Phase = "quiet"
    since: int = -1
    """The step at which the value first passed the threshold, this time."""
    finding: Finding | None = None
    """What it reported when it fired; None while it does not fire."""
    reported: Finding | None = None
    """What it reported last, over or not."""
    ended: int = -1
    """The step at which it was over, the last time."""
    fired: int = 0
    """How often it has fired."""
    noticed: int = -1
    """The step at which it fired, this time."""
    began: float = math.nan
    """The value at ``since``."""
    latest: tuple[int, Measured] | None = None
    """The last step at which the value was beyond the threshold, and what was found."""
    _beyond: int = 0
    _past: int = 0

    def update(
        self, step: int, found: Measured, *, counts: bool = True
    ) -> list[Finding]:
        """Take what was found; return what is new: most of the time nothing.

        A reading that does not count neither lengthens a wait nor begins one.
        """
        beyond = self.rule.is_beyond(found.value, self.rule.threshold)
        if beyond:
            self.latest = step, found
        if self.phase == "firing":
            return self._while_firing(step, found)
        if not beyond:
            self.phase, self._beyond = "quiet", 0
            return []
        return self._while_pending(step, found) if counts else []

    def _while_pending(self, step: int, found: Measured) -> list[Finding]:
        if self.phase != "pending":
            self.since, self.began = step, found.value
        self.phase, self._beyond = "pending", self._beyond + 1
        if self._beyond < self.rule.persist:
            return []
        self.phase, self._past, self.fired = "firing", 0, self.fired + 1
        self.noticed = step
        finding = self._report(step, found)
        if not self.rule.lasts:
            self.phase, self._beyond, self.finding = "quiet", 0, None
        return [finding]

    def _while_firing(self, step: int, found: Measured) -> list[Finding]:
        rule = self.rule
        over = not rule.is_beyond(found.value, rule.release)
        self._past = self._past + 1 if over else 0
        if self._past >= rule.recover:
            return [self._end(step, found)]
        was = self.finding.severity if self.finding else "info"
        if self._severity(found) == rule.worse != was:
            return [self._report(step, found)]
        return []

    def _end(self, step: int, found: Measured) -> Finding:
        began, self.finding, self.ended = self.since, None, step
        self.phase, self._beyond, self._past = "quiet", 0, 0
        params: dict[str, Scalar] = {"value": found.value, "resolved": True}
        return Finding.info(
            step, self.rule.name, site=found.site, **params, since=began
        )

    def _report(self, step: int, found: Measured) -> Finding:
        self.finding = self.reported = self._finding(step, found)
        return self.finding

    def _finding(self, step: int, found: Measured) -> Finding:
        return Finding(
            step=step,
            severity=self._severity(found),
            code=self.rule.name,
            site=found.site,
            params={
                "value": found.value,
                "threshold": self.rule.threshold,
                "since": self.since,
                "value_since": self.began,
                "quantity": self.rule.reads[0],
                **found.params,
            },
        )

    def forget_unless_firing(self) -> None:
        """Forget what was over before it was reported: the start, no trouble."""
        if self.finding is None:
            self.reported, self.fired = None, 0

    def _severity(self, found: Measured) -> Severity:
        severe = self.rule.severe
        worse = severe is not None and self.rule.is_beyond(found.value, severe)
        return self.rule.worse if worse else self.rule.severity

    @property
    def now(self) -> Finding | None:
        """What it finds as things stand, if it fires, and when it was noticed."""
        if self.finding is None or self.latest is None:
            return None
        found = self._finding(*self.latest)
        return replace(found, params={**found.params, "noticed": self.noticed})

    @property
    def over(self) -> Finding | None:
        """What it reported last, if that is over, from when to when, how often."""
        if self.reported is None or self.finding is not None:
            return None
        params: dict[str, Scalar] = {
            **self.reported.params,
            "since": self.since,
            "ended": self.ended,
            "times": self.fired,
            "case": "over",
        }
        return replace(self.reported, params=params)


@dataclass(slots=True, eq=False)
class RuleAtWork:
    """A rule on one run, with a condition for each place it finds."""

    rule: Rule
    broken: bool = False
    """Whether it raised, and is asked no more."""
    _places: dict[tuple[str, Scalar], Condition] = field(default_factory=dict)

    @property
    def conditions(self) -> Iterable[Condition]:
        return self._places.values()

    @property
    def firing(self) -> list[Finding]:
        """What fires, the first 40; the rest is counted."""
        return _listed([c.finding for c in self.conditions if c.finding is not None])

    def ask(self, history: History, *, counts: bool = True) -> list[Finding]:
        """Look at the history; return what is new: most of the time nothing.

        A boundary: a user's rule may raise anything, and must not end the training.
        """
        if self.broken:
            return []
        try:
            found = list(self._measured(history))
        except Exception as error:
            self.broken = True
            return [_failed(history.step, self.rule, error)]
        return _listed(
            [
                new
                for one in found
                for new in self._at(one).update(history.step, one, counts=counts)
            ]
        )

    def _measured(self, history: History) -> Iterable[Measured]:
        found = self.rule.measure(history)
        if found is None:
            return ()
        if isinstance(found, Measured):
            return (found,)
        if isinstance(found, int | float):
            return (measured(float(found)),)
        return found

    def _at(self, found: Measured) -> Condition:
        """Return the condition of a place: a site, and a head or case where it says."""
        place: tuple[str, Scalar] = ("", None)
        if self.rule.many:
            place = found.site, f"{found.params.get('head')} {found.params.get('case')}"
        if place not in self._places:
            self._places[place] = Condition(self.rule)
        return self._places[place]


def _listed(found: list[Finding]) -> list[Finding]:
    if len(found) <= MOST:
        return found
    first, count = found[0], len(found) - MOST
    more = Finding.info(first.step, MORE, of=first.code, count=count)
    return [*found[:MOST], replace(more, severity=first.severity)]


def _failed(step: int, rule: Rule, error: Exception) -> Finding:
    return Finding.warn(step, FAILED, rule=rule.name, error=repr(error))
