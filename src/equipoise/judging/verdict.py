"""A verdict: what is wrong with a run, a checkpoint or a start, as data.

Everything in it is a finding or a number; ``equipoise.text`` makes the sentences.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from equipoise.judging.rules.registry import RuleSubject
from equipoise.records import Finding, Record, Scalar, html_table

State = Literal["healthy", "at risk", "failing", "dead", "not judged"]
STATES: tuple[State, ...] = ("healthy", "not judged", "at risk", "failing", "dead")
"""From the best to the worst."""
Reason = Literal[
    "",
    "few_samples",
    "no_loss",
    "no_gradient",
    "no_attention",
    "gap",
    "packed",
    "failed",
]
"""Why something is not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Record):
    """What is wrong with a run, a checkpoint or the start of a run."""

    state: State
    of: RuleSubject = "run"
    step: int = -1
    """The step it stands for: the last one that was read."""
    since: int | None = None
    """The step from which it is true; None of a healthy run, or one not judged."""
    lead: Finding | None = None
    """What comes first, as it stands now: what began first, or the gap."""
    cause: Finding | None = None
    """A setting that was seen to move before it, if one was."""
    effects: tuple[Finding, ...] = ()
    """What it does to the loss, as it stands now."""
    over: tuple[Finding, ...] = ()
    """What fired and is over, the earliest first."""
    findings: tuple[Finding, ...] = ()
    """What fires, as it was reported when it fired, the gravest first."""
    now: Mapping[str, Finding] = field(default_factory=dict)
    """Rule → what holds now, for every rule of a run that fires."""
    where: str | None = None
    """The site at fault now; nothing for the whole model, None where no rule fires."""
    seen: str = ""
    """The site that shows it most, as things stand now."""
    recovered: bool = False
    """Whether a loss that had gone wrong came back: healthy, and worth a look."""
    reason: Reason = ""
    """Why it is not judged."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """What was not seen of the loop of a healthy run: ``section.what`` → why."""
    coverage: Mapping[str, Scalar] = field(default_factory=dict)
    """What it stands on: how many rules, samples, tensors or steps, and the loss."""
    quantities: tuple[str, ...] = ()
    """What rules that fired stand on."""
    headline: str = ""
    """What is wrong, filled with the sentence; ``because`` is by what one sees it."""
    because: str = ""
    sentence: str = ""
    """The sentence of the day: empty where a verdict is made, filled when it leaves."""
    advice: str = ""
    """What to do, filled with the sentence."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        read = {key: _read(key, item) for key, item in given.items() if key in known}
        return cls(**read)

    def __repr__(self) -> str:
        since = "" if self.since is None else f", since step {self.since}"
        return f"Verdict({self.state!r}, {self.sentence!r}{since})"

    def _repr_html_(self) -> str:
        rows = [
            (f.severity, f"step {f.step}", f.site, f.message) for f in self.findings
        ]
        advice = [("try", "", "", self.advice)] if self.advice else []
        return html_table(f"{self.state}: {self.sentence}", [*advice, *rows])


def _read(key: str, item: Any) -> Any:
    if key in ("findings", "effects", "over"):
        return tuple(map(Finding.from_dict, item))
    if key in ("lead", "cause") and item is not None:
        return Finding.from_dict(item)
    if key == "now":
        return {code: Finding.from_dict(found) for code, found in item.items()}
    return tuple(item) if key == "quantities" else item
