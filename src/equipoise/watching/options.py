"""What a user may choose when watching, validated when it is said."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

from equipoise.errors import InputError
from equipoise.records import Finding

Preset = Literal["minimal", "default", "deep"]


class Sink(Protocol):
    """Somewhere else the numbers go: a mapping of names to numbers, and the step."""

    def log(self, values: dict[str, float], step: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How often to look, how hard, and whom to tell."""

    every: int = 10
    """Sample one step in this many, counted from the first."""
    at: Collection[int] = ()
    """Steps to sample besides, whatever ``every`` and ``budget`` say."""
    budget: float | None = None
    """Largest share of the training's time that sampling may take, such as 0.02.
    ``every`` is then the least interval, and grows until the budget is kept."""
    preset: Preset = "default"
    """What is measured: ``minimal``, ``default`` or ``deep``."""
    strict: bool = False
    """Let an exception of ours reach the training loop. For tests, not for training."""
    hold_batch: bool = False
    """Hold every step's batch by reference, so that a step whose loss turns non-finite
    is replayed at once and saved for ``equipoise replay``. Costs one hook per step."""
    quiet: bool = False
    """Print nothing on attaching and closing."""
    on_finding: Callable[[Finding], Any] | None = field(default=None, compare=False)
    """Called with each finding, on every rank."""
    sinks: Sequence[Sink] = field(default=(), compare=False)
    """Where readings go besides the run file."""

    def __post_init__(self) -> None:
        if not _steps(self.every, least=1):
            raise InputError(f"every={self.every!r}: sample every 1, 2, … steps")
        if self.budget is not None and not _share(self.budget):
            raise InputError(f"budget={self.budget!r}: a share of time, such as 0.02")
        if self.preset not in get_args(Preset):
            known = ", ".join(get_args(Preset))
            raise InputError(f"preset={self.preset!r}: choose one of {known}")
        if not isinstance(self.at, Collection) or not all(map(_steps, self.at)):
            raise InputError(f"at={self.at!r}: a list of steps, which count from 0")


def _steps(value: object, *, least: int = 0) -> bool:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and int(value) >= least  # type: ignore[call-overload]


def _share(value: object) -> bool:
    return isinstance(value, Real) and 0 < float(value) <= 1
