"""Where findings go: the log, the run, whoever asked to be called.

One line when an instrument is attached, one when it comes off.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from equipoise.anatomy.sites import Anatomy
from equipoise.records import Finding

if TYPE_CHECKING:
    from equipoise.watching.handle import Watch


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


def attached(handle: "Watch") -> None:
    """Say what is watched, what is not, and where to look."""
    found = sites(handle.anatomy)
    look = f"equipoise report {handle.path}"
    _say(handle, f"watching {found}; run {handle.path}; {look}")


def closing(handle: "Watch") -> None:
    """Say how it went."""
    _say(handle, verdict(handle))


def sites(anatomy: Anatomy) -> str:
    """Return what was found, in words."""
    count = len(anatomy.attention)
    if not count:
        return f"{anatomy.family}, whose attention, if any, only its calls will show"
    text = f"{count} attention site{'' if count == 1 else 's'} of {anatomy.family}"
    unread = [site.name for site in anatomy.attention if site.projections is None]
    if unread:
        more = f" and {len(unread) - 2} more" if len(unread) > 2 else ""
        text += f" (projections unread: {', '.join(unread[:2])}{more})"
    return text


def verdict(handle: "Watch") -> str:
    """Return the run in a sentence: the gravest finding, or that there is none."""
    steps = f"{handle.current_step} steps watched"
    worst = handle.voice.worst
    if worst is None:
        return f"{steps}, nothing found; equipoise report {handle.path}"
    where = f" at {worst.site}" if worst.site else ""
    return (
        f"{steps}, {worst.severity} at step {worst.step}{where}: {worst.message}; "
        f"equipoise report {handle.path}"
    )


def _say(handle: "Watch", text: str) -> None:
    if not handle.speaks:
        return
    # Once: to whoever listens to our log, else to stderr, a job's file included.
    if log.isEnabledFor(logging.INFO):
        log.info("equipoise: %s", text)
    elif not handle.options.quiet:
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[bold]equipoise[/bold] {text}", highlight=False)
