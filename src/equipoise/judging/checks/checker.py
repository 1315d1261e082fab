"""The checker: facts in, findings out; what holds again is withdrawn."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from equipoise.judging.checks import CHECKS
from equipoise.judging.checks.expected import Expected, is_expected
from equipoise.judging.checks.registry import Check, Violation
from equipoise.judging.facts import Facts
from equipoise.judging.rules.conditions import FAILED
from equipoise.records import Finding

REMEMBERED = 16
"""Sampled steps whose facts a check can look back on."""


@dataclass(slots=True)
class Checker:
    """Checks the loop of one run, sampled step by sampled step."""

    expected: Expected = field(default_factory=dict)
    """What the user said is meant, and where."""
    checks: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    _facts: deque[Facts] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _violated: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """Code and site → what was found there and still holds."""
    _broken: set[str] = field(default_factory=set)

    def add(self, facts: Facts) -> list[Finding]:
        """Take the facts of a sampled step; return what is new, and what is over."""
        self._facts.append(facts)
        found: list[Finding] = []
        for code, check in self.checks.items():
            if code not in self._broken:
                found += self._asked(check, facts.step)
        return found

    def _asked(self, check: Check, step: int) -> list[Finding]:
        """Ask one check; a boundary: one that raises is asked no more."""
        latest = self._facts[-1]
        if not all(latest.section(name) for name in check.reads):
            return []
        try:
            violations = check.find(tuple(self._facts))
            places = None if violations is None else self._unmeant(check, violations)
        except Exception as error:
            self._broken.add(check.code)
            return [Finding.warn(step, FAILED, rule=check.code, error=repr(error))]
        return [] if places is None else self._compared(check, step, places)

    def _unmeant(self, check: Check, found: Iterable[Violation]) -> list[Violation]:
        """Return the violations that the user has not said are meant."""
        return [one for one in found if not is_expected(self.expected, check, one)]

    def _compared(
        self, check: Check, step: int, places: Sequence[Violation]
    ) -> list[Finding]:
        """Return the new violations, and withdraw those that are mended."""
        now = {(check.code, place.site): place for place in places}
        over = [k for k in self._violated if k[0] == check.code and k not in now]
        found = [self._withdrawn(key, step) for key in over]
        for key, place in now.items():
            if key not in self._violated:
                self._violated[key] = _finding(check, step, place)
                found.append(self._violated[key])
        return found

    def _withdrawn(self, key: tuple[str, str], step: int) -> Finding:
        since, (code, site) = self._violated.pop(key).step, key
        return Finding.info(step, code, site=site, resolved=True, since=since)


def _finding(check: Check, step: int, place: Violation) -> Finding:
    return Finding(
        step=step,
        severity=place.severity or check.severity,
        code=check.code,
        site=place.site,
        params={"since": step, **place.params},
    )
