"""The state of a rule over a run: pending, firing, resolved.

A condition is pending while its value is beyond the threshold, fires after ``persist``
readings in a row, and is over after ``recover`` readings in a row past ``release``.
Between the two limits nothing changes, so it does not flicker; a step at which the rule
cannot know (None) changes nothing, so missing data never end an alarm.
"""

import math
from dataclasses import dataclass
from typing import Literal

from equipoise.judging.history import History
from equipoise.judging.remedy_catalogue import advise
from equipoise.judging.rules.registry import Measured, Rule, measured
from equipoise.records import Finding, Severity

Phase = Literal["quiet", "pending", "firing", "broken"]


@dataclass(slots=True, eq=False)
class Condition:
    """A rule at work on one run."""

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

    def update(self, history: History) -> list[Finding]:
        """Look at the history; return what is new: most of the time nothing."""
        found = self.rule.measure(history)
        if found is None:
            return []
        if not isinstance(found, Measured):
            found = measured(float(found))
        beyond = self.rule.is_beyond(found.value, self.rule.threshold)
        if beyond:
            self.latest = history.step, found
        if self.phase == "firing":
            return self._while_firing(history.step, found)
        if not beyond:
            self.phase, self._beyond = "quiet", 0
            return []
        return self._while_pending(history.step, found)

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
        if self._severity(found) == "error" and self._reported() != "error":
            return [self._report(step, found)]
        return []

    def _end(self, step: int, found: Measured) -> Finding:
        began, self.finding, self.ended = self.since, None, step
        self.phase, self._beyond, self._past = "quiet", 0, 0
        return Finding(
            step=step,
            severity="info",
            code=self.rule.name,
            site=found.site,
            message=f"over since step {step} ({self.rule.name} began at step {began})",
            params={"value": found.value, "resolved": True},
        )

    def _report(self, step: int, found: Measured) -> Finding:
        self.finding = Finding(
            step=step,
            severity=self._severity(found),
            code=self.rule.name,
            site=found.site,
            message=self.rule.sentence(found),
            advice=found.advice or advise(self.rule.remedies),
            params={
                "value": found.value,
                "threshold": self.rule.threshold,
                "since": self.since,
                "value_since": self.began,
                "quantity": self.rule.reads[0],
                **found.evidence,
            },
        )
        self.reported = self.finding
        return self.finding

    def forget_unless_firing(self) -> None:
        """Forget what was over before it was reported: the start, no trouble."""
        if self.finding is None:
            self.reported, self.fired = None, 0

    def _severity(self, found: Measured) -> Severity:
        severe = self.rule.severe
        worse = severe is not None and self.rule.is_beyond(found.value, severe)
        return "error" if worse else self.rule.severity

    @property
    def sentence(self) -> str:
        """What holds now, the step it was read at, since when, and when it fired."""
        if self.finding is None or self.latest is None:
            return ""
        step, found = self.latest
        when = [f"step {step}"]
        if self.since < step:
            when.append(f"since step {self.since}")
        if self.since < self.noticed < step:
            when.append(f"noticed at step {self.noticed}")
        return f"{self.rule.sentence(found)} ({', '.join(when)})"

    @property
    def advice(self) -> str:
        """What to do as things stand now: what is found may change while it fires."""
        if self.finding is None or self.latest is None:
            return ""
        return self.latest[1].advice or self.finding.advice

    def _reported(self) -> Severity:
        return self.finding.severity if self.finding else "info"
