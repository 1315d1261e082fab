"""Where findings go: the log, the run, whoever asked to be called."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from equipoise.records import Finding

log = logging.getLogger("equipoise")
LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class Voice:
    """Says each finding once: to the log on the first rank, to the user on all."""

    def __init__(
        self, on_finding: Callable[[Finding], Any] | None, *, speaks: bool = True
    ) -> None:
        self._on_finding, self._speaks = on_finding, speaks
        self.said: list[Finding] = []

    def say(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return what is new among them, after saying it."""
        new = [finding for finding in findings if finding not in self.said]
        for finding in new:
            self.said.append(finding)
            if self._speaks:
                where = f" at {finding.site}" if finding.site else ""
                text = f"equipoise: step {finding.step}{where}: {finding.message}"
                log.log(LEVELS[finding.severity], "%s", text)
            if self._on_finding is not None:
                self._on_finding(finding)
        return new

    @property
    def worst(self) -> Finding | None:
        """The gravest finding, the earliest of those."""
        ranks = {"error": 0, "warn": 1, "info": 2}
        return min(self.said, key=lambda f: (ranks[f.severity], f.step), default=None)
