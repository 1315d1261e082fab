"""Options of the autopilot: what it may do, how often, how far, and who is asked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from equipoise.errors import InputError
from equipoise.records import Record, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(Record):
    """What the autopilot wants to do, and why; given to the ``ask`` callback."""

    step: int
    treatment: str
    """The name of the treatment, as in ``docs/autopilot.md``."""
    remedies: dict[str, dict[str, Scalar]]
    """Remedy → the options it is applied with."""
    back_to: int | None
    """The step whose weights are restored first; None: the present ones."""
    because: str
    """The evidence in one sentence."""
    trial: str = ""
    """What the shadow trial showed, or why there was none."""

    def __str__(self) -> str:
        back = "" if self.back_to is None else f"back to step {self.back_to}, then "
        return f"{back}{self.treatment} ({', '.join(self.remedies)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Autopilot:
    """What the autopilot may do.

    >>> Autopilot(most=1).dry_run
    False
    """

    dry_run: bool = False
    """Log what it would do, and do nothing."""
    ask: Callable[[Proposal], bool | None] | None = field(default=None, compare=False)
    """Called on the first rank before anything is done: True applies, False declines
    for good, None asks again at the next sampled step. Other ranks wait for the answer
    at most 20 seconds."""
    most: int = 4
    """Treatments in one run; then it only watches."""
    apart: int = 20
    """Least steps between one treatment and the next."""
    back: int | None = None
    """Steps it may go back at most; None: to any snapshot."""
    snapshot_every: int = 20
    """Steps between snapshots of weights and optimiser state."""
    memory: float = 2.0
    """GB of host memory for snapshots on each rank; 0 keeps none."""
    probation: int = 4
    """Sampled steps after which a treatment is kept or withdrawn."""
    untried: bool = False
    """Act also with optimisers, kinds of models and stages on which the autopilot was
    not tried; unless set it only says there what it would do."""
    loss: Callable[[Any], Any] | None = field(default=None, compare=False)
    """``loss(model)`` → the loss of a batch of its own choice, with gradient: makes
    shadow trials possible for a model that does not return its loss."""
    trial_steps: int = 8
    """Steps of a shadow trial for each candidate; 0 makes none."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InputError(f"autopilot: {name}={value!r} must be {least} or more")
        for name in ("ask", "loss"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InputError(f"autopilot: {name}={given!r} must be a function")


LEAST = {
    "most": 1,
    "apart": 1,
    "back": 1,
    "snapshot_every": 1,
    "memory": 0,
    "probation": 1,
    "trial_steps": 0,
}
Given = bool | str | Callable[[Proposal], bool | None] | Autopilot
"""What ``watch(..., autopilot=…)`` takes."""


def read_autopilot(given: object) -> Autopilot | None:
    """Return the options that an argument means; None switches the autopilot off.

    >>> read_autopilot("dry-run").dry_run, read_autopilot(False)
    (True, None)
    """
    if given is None or given is False:
        return None
    if isinstance(given, Autopilot):
        return given
    if given is True:
        return Autopilot()
    if given == "dry-run":
        return Autopilot(dry_run=True)
    if callable(given):
        return Autopilot(ask=given)
    raise InputError(
        f"autopilot={given!r}: give True, 'dry-run', a function that is asked, or "
        "equipoise.autopilot.options.Autopilot(...)"
    )
