"""What a user may choose when watching, validated when it is said.

One configuration from four places: arguments, environment, file, defaults.

Which probes each preset puts on: one line per probe, cheapest preset first.

Each entry makes a new probe, because a probe keeps the state of one watched model. The
argument is over how many ranks its values will be put together.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from equipoise.errors import InputError
from equipoise.probes.attention import AttentionRows
from equipoise.probes.backward import BackwardFactors
from equipoise.probes.capture import Probe
from equipoise.probes.curvature import Sharpness
from equipoise.probes.gain import HeadProducts, ProjectionGain
from equipoise.probes.gradients import GradientNorms
from equipoise.probes.lipschitz import LocalLipschitz
from equipoise.probes.logits import OutputLogits
from equipoise.probes.norm_scales import NormScales
from equipoise.probes.precision import NumericalFragility
from equipoise.probes.residual import Magnitudes, StreamShape
from equipoise.probes.router import RouterLoad
from equipoise.probes.selection import HeadSelection
from equipoise.probes.updates import AdamUpdates
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


FILE = "equipoise.toml"
PREFIX = "EQUIPOISE_"
# Read by others: where runs live, how the command line reports its defects.
NOT_OURS = {
    *("EQUIPOISE_LAB", "EQUIPOISE_RUNS"),
    *("EQUIPOISE_TRACEBACK", "EQUIPOISE_TEST_PROCESSES"),
}

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def chosen(given: Mapping[str, Any]) -> WatchOptions:
    """Return the options: arguments over ``EQUIPOISE_*`` over ``equipoise.toml``.

    Raises:
        InputError: If any of them names an option that does not exist.
    """
    _known(given, "watch")
    return WatchOptions(**{**from_file(Path(FILE)), **from_environment(), **given})


def from_file(path: Path) -> dict[str, Any]:
    """Return the ``[watch]`` table of a configuration file, if there is one."""
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("watch", {})
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    _known(table, f"{path} [watch]")
    return dict(table)


def from_environment() -> dict[str, Any]:
    """Return the options that ``EQUIPOISE_EVERY=20`` and its like set."""
    named = {
        key.removeprefix(PREFIX).lower(): (key, text)
        for key, text in os.environ.items()
        if key.startswith(PREFIX) and key not in NOT_OURS
    }
    _known(named, "the environment", prefix=PREFIX)
    return {name: _parsed(name, *said) for name, said in named.items()}


def _parsed(name: str, key: str, text: str) -> Any:
    if name not in PARSERS:
        raise InputError(f"{key}: cannot be set from the environment; pass it to watch")
    try:
        return PARSERS[name](text)
    except ValueError as error:
        raise InputError(f"{key}={text!r}: {error}") from error


def _switch(text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError("say 1 or 0")
    return text.lower() in TRUE


PARSERS: dict[str, Callable[[str], Any]] = {
    "every": int,
    "at": lambda text: tuple(int(word) for word in text.split(",")),
    "budget": float,
    "preset": str,
    "strict": _switch,
    "hold_batch": _switch,
    "quiet": _switch,
}


def _known(names: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
    options = [f.name for f in fields(WatchOptions)]
    for name in names:
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.0)[0]
            said = f"{prefix}{name.upper()}" if prefix else name
            meant = f"{prefix}{near.upper()}" if prefix else near
            raise InputError(
                f"{said}: no such option in {where}; the nearest is {meant} "
                f"(all: {', '.join(options)})"
            )


Maker = Callable[[int], Probe]

MINIMAL: tuple[Maker, ...] = (
    lambda ranks: AttentionRows(ranks=ranks),
    lambda ranks: GradientNorms(ranks=ranks),
)
DEFAULT: tuple[Maker, ...] = (
    *MINIMAL,
    lambda ranks: ProjectionGain(ranks=ranks),
    lambda ranks: Magnitudes(),
    lambda ranks: NormScales(),
    lambda ranks: StreamShape(),
    lambda ranks: BackwardFactors(),
    lambda ranks: AdamUpdates(ranks=ranks),
    lambda ranks: RouterLoad(),
    lambda ranks: OutputLogits(),
)
DEEP: tuple[Maker, ...] = (
    *DEFAULT,
    lambda ranks: HeadProducts(),
    lambda ranks: LocalLipschitz(ranks=ranks),
    lambda ranks: HeadSelection(),
    lambda ranks: NumericalFragility(ranks=ranks),
    lambda ranks: Sharpness(),
)

PRESETS: dict[str, tuple[Maker, ...]] = {
    "minimal": MINIMAL,
    "default": DEFAULT,
    "deep": DEEP,
}


def probes(preset: str, *, ranks: int = 1) -> list[Probe]:
    """Return the probes of a preset, new."""
    return [make(ranks) for make in PRESETS[preset]]
