"""What the autopilot has done so far: its log, its budget, what is active.

All of it is JSON, so that a checkpoint carries it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from equipoise.records import Finding, Record

Event = Literal[
    "applied",
    "would apply",
    "kept",
    "withdrawn",
    "declined",
    "refused",
    "stopped",
    "dry run",
    "snapshots",
]
CHANGES = ("applied", "withdrawn", "stopped", "dry run")
"""Events that a person should see: the run is not what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry(Record):
    """One line of the autopilot's log."""

    step: int
    event: Event
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.event}: {self.text}"

    def finding(self) -> Finding:
        """Return it as a finding of the run."""
        return Finding(
            step=self.step,
            severity="warn" if self.event in CHANGES else "info",
            code=f"autopilot.{self.event.replace(' ', '_')}",
            params={"event": self.event, "text": self.text},
        )


@dataclass(slots=True, kw_only=True)
class Course:
    """The treatment that is being watched, and what it is measured against."""

    treatment: str
    step: int
    """At whose end it was applied."""
    back_to: int | None
    reference: float
    """The loss before the trouble; before the treatment where it did not go back."""
    samples: int = 0
    """Sampled steps since."""


@dataclass(slots=True, kw_only=True)
class State:
    """Everything a checkpoint carries, but what remedies count for themselves."""

    used: int = 0
    """Treatments applied so far."""
    settled: int = 0
    """The step until which what fires is laid to the last change."""
    failed: list[str] = field(default_factory=list)
    """Treatments that were withdrawn as harmful, refused or declined."""
    muted: list[str] = field(default_factory=list)
    """Rules that fired while the run settled: they count again once released."""
    active: list[str] = field(default_factory=list)
    """Treatments in force, in the order applied."""
    course: Course | None = None
    log: list[LogEntry] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "State":
        course = given["course"]
        made = {
            **given,
            "course": None if course is None else Course(**course),
            "log": [LogEntry(**entry) for entry in given["log"]],
        }
        return cls(**made)
