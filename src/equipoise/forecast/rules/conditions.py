"""The state of a rule over a run: pending, firing, resolved.

A condition is pending while its value is beyond the threshold, fires after ``persist``
readings in a row, and is over after ``recover`` readings in a row past ``release``.
Between the two limits nothing changes, so it does not flicker; a step at which the rule
cannot know (None) changes nothing, so missing data never end an alarm.
"""

from dataclasses import dataclass
from typing import Literal

from equipoise.forecast.history import History
from equipoise.forecast.remedy_catalogue import advise
from equipoise.forecast.rules.registry import Measured, Rule, measured
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
    """What it said when it fired; None while it does not fire."""
    fired: int = 0
    """How often it has fired."""
    _beyond: int = 0
    _past: int = 0

    def update(self, history: History) -> list[Finding]:
        """Look at the history; return what is new: most of the time nothing."""
        found = self.rule.measure(history)
        if found is None:
            return []
        if not isinstance(found, Measured):
            found = measured(float(found))
        if self.phase == "firing":
            return self._while_firing(history.step, found)
        if not self.rule.is_beyond(found.value, self.rule.threshold):
            self.phase, self._beyond = "quiet", 0
            return []
        self.since = self.since if self.phase == "pending" else history.step
        self.phase, self._beyond = "pending", self._beyond + 1
        if self._beyond < self.rule.persist:
            return []
        self.phase, self._past, self.fired = "firing", 0, self.fired + 1
        finding = self._report(history.step, found)
        if not self.rule.lasts:
            self.phase, self._beyond, self.finding = "quiet", 0, None
        return [finding]

    def _while_firing(self, step: int, found: Measured) -> list[Finding]:
        rule = self.rule
        over = not rule.is_beyond(found.value, rule.release)
        self._past = self._past + 1 if over else 0
        if self._past >= rule.recover:
            return [self._end(step, found)]
        if self._severity(found) == "error" and self._said() != "error":
            return [self._report(step, found)]
        return []

    def _end(self, step: int, found: Measured) -> Finding:
        began, self.finding = self.since, None
        self.phase, self._beyond, self._past = "quiet", 0, 0
        return Finding(
            step=step,
            severity="info",
            rule=self.rule.name,
            site=found.site,
            message=f"over since step {step} ({self.rule.name} began at step {began})",
            evidence={"value": found.value, "resolved": True},
        )

    def _report(self, step: int, found: Measured) -> Finding:
        self.finding = Finding(
            step=step,
            severity=self._severity(found),
            rule=self.rule.name,
            site=found.site,
            message=self.rule.sentence(found),
            advice=found.advice or advise(self.rule.remedies),
            evidence={
                "value": found.value,
                "threshold": self.rule.threshold,
                "since": self.since,
                "quantity": self.rule.reads[0],
                **found.evidence,
            },
        )
        return self.finding

    def _severity(self, found: Measured) -> Severity:
        severe = self.rule.severe
        worse = severe is not None and self.rule.is_beyond(found.value, severe)
        return "error" if worse else self.rule.severity

    def _said(self) -> Severity:
        return self.finding.severity if self.finding else "info"
