"""Options of ``watch``: what a user may choose, from where, and what each preset reads.

Arguments come first, then ``EQUIPOISE_*`` variables, then ``equipoise.toml``, then
defaults; all are validated at once. A preset is a list of probes, the cheapest preset
first; each is made anew, because a probe keeps the state of one watched model.
"""

import difflib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from torch import Tensor

from equipoise.autopilot.options import Given as GivenAutopilot
from equipoise.autopilot.options import read_autopilot
from equipoise.errors import InputError
from equipoise.judging.checks import CHECKS
from equipoise.judging.checks.expected import Expected, read_expected
from equipoise.judging.rules import load_rules
from equipoise.judging.rules.registry import FILE, settings_in
from equipoise.judging.verdict import STATES
from equipoise.probes.attention import AttentionRows
from equipoise.probes.backward import BackwardFactors
from equipoise.probes.gain import HeadProducts, ProjectionGain
from equipoise.probes.gradients import GradientNorms
from equipoise.probes.hidden_states import Magnitudes, NormScales, StreamShape
from equipoise.probes.logits import OutputLogits
from equipoise.probes.mixers import MixerGates
from equipoise.probes.protocols import Probe
from equipoise.probes.router import RouterLoad
from equipoise.probes.updates import UnchangedWeights, Updates
from equipoise.records import Finding
from equipoise.sinks import Given, check, is_sequence

log = logging.getLogger("equipoise")

Preset = Literal["minimal", "default", "deep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How often to measure, what, and where the results go."""

    every: int = 10
    """Sample one step in this many, counted from the first."""
    at: Collection[int] = ()
    """Steps to sample besides, whatever ``every`` and ``budget`` say."""
    dense_start: bool = True
    """Sample nine more of the first 30 steps: a mistake of the loop is then named at
    step 1 or 2, and a first verdict stands by step 30."""
    budget: float | None = None
    """Largest share of the training's time that sampling may take, such as 0.02.
    ``every`` is then the least interval, and grows until sampling fits the budget."""
    preset: Preset = "default"
    """What is measured: ``minimal``, ``default`` or ``deep``."""
    rows: int | Literal["all"] = 512
    """Queries of an attention call whose rows are read. Of a longer sequence so many
    are chosen, spread evenly and anew at each sample; ``"all"`` reads every row."""
    strict: bool = False
    """Let an exception of ours reach the training loop, and raise where something that
    runs cannot be read. For tests, not for training."""
    hold_batch: bool = False
    """Hold every step's batch by reference, so that a step whose loss turns non-finite
    is replayed at once and saved for ``equipoise replay``. Costs one hook per step."""
    checks: Literal["passive", "active"] = "passive"
    """``"active"`` also tries influence, twice in the first steps: some ten forward
    passes of one micro-batch, without gradients, with everything put back."""
    expect: Mapping[str, bool | str | Sequence[str]] = field(default_factory=dict)
    """What a check would warn of and you mean: ``{"frozen": "layers.*"}`` names modules
    or parameters, ``{"same_batch": True}`` all of the loop (``equipoise rules``)."""
    stop_on: Collection[str] = ()
    """Rules, checks or states at which ``handle.should_stop`` becomes true and
    callbacks stop the training: ``"update.too_large"``, ``"failing"``."""
    autopilot: GivenAutopilot = False
    """Treat what a verdict finds: True, ``"dry-run"`` (only say what would be done), a
    function that is asked, or an :class:`Autopilot` (``docs/autopilot.md``)."""
    metrics_port: int | None = None
    """Answer Prometheus on this port of the loopback interface; 0 takes a free one."""
    quiet: bool = False
    """Print nothing on attaching and closing."""
    on_finding: Callable[[Finding], Any] | None = field(default=None, compare=False)
    """Called with each finding, on every rank."""
    sinks: Sequence[Given] = field(default=(), compare=False)
    """Where readings go besides the run file: names (``"wandb"``, ``"jsonl:PATH"``),
    callables taking ``(values, step)``, anything with ``log(values, step)``."""

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
        if self.metrics_port is not None and not _steps(self.metrics_port):
            raise InputError(
                f"metrics_port={self.metrics_port!r}: a port, such as 9400"
            )
        _check_rows(self.rows)
        _check_checks(self.checks)
        _check_stops(self)
        _check_callback(self.on_finding)
        _check_port(self.metrics_port)
        object.__setattr__(self, "expect", self.expected)
        read_autopilot(self.autopilot)
        if not is_sequence(self.sinks):
            object.__setattr__(self, "sinks", (self.sinks,))
        for sink in self.sinks:
            check(sink)

    @property
    def expected(self) -> Expected:
        """What is meant, as patterns by key."""
        return read_expected(self.expect, CHECKS)


class WatchArguments(TypedDict, total=False):
    """The same as keyword arguments, so that type checkers refuse an unknown one."""

    every: int
    at: Collection[int]
    dense_start: bool
    budget: float | None
    preset: Preset
    rows: int | Literal["all"]
    strict: bool
    hold_batch: bool
    checks: Literal["passive", "active"]
    expect: Mapping[str, bool | str | Sequence[str]]
    forecast: bool
    """Ignored: the fitted forecast was removed."""
    stop_on: Collection[str]
    autopilot: GivenAutopilot
    metrics_port: int | None
    quiet: bool
    on_finding: Callable[[Finding], Any] | None
    sinks: Sequence[Given]


class CallbackArguments(WatchArguments, total=False):
    """What the callbacks of trainers take: everything ``watch`` does but the model."""

    run: str | Path | None
    name: str | None
    info: dict[str, Any] | None
    probes: Sequence[Probe] | None


def check_callback(arguments: CallbackArguments) -> CallbackArguments:
    """Return the arguments of a callback.

    Raises:
        InputError: If one makes no sense: when the callback is made, not in training.
    """
    own = CallbackArguments.__annotations__.keys() - WatchArguments.__annotations__
    read_options({k: v for k, v in arguments.items() if k not in own})
    return arguments


def _check_callback(given: object) -> None:
    if given is not None and not callable(given):
        raise InputError(f"on_finding={given!r}: a function that takes a finding")


def _check_port(port: object) -> None:
    if port is not None and not _steps(port):
        raise InputError(f"metrics_port={port!r}: a port, such as 9400")


def _check_checks(checks: object) -> None:
    if checks not in ("passive", "active"):
        raise InputError(f"checks={checks!r}: choose passive or active")


def _check_rows(rows: object) -> None:
    if rows != "all" and not _steps(rows, least=16):
        raise InputError(f"rows={rows!r}: 16 or more queries, or 'all'")


def _check_stops(options: WatchOptions) -> None:
    given = options.stop_on
    names = (given,) if isinstance(given, str) else tuple(given)
    known = {*STATES, *load_rules(), *CHECKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise InputError(
                f"stop_on={name!r}: no rule, check or state; the nearest is {near[0]} "
                "(equipoise rules lists them)"
            )
    object.__setattr__(options, "stop_on", names)


def _steps(value: object, *, least: int = 0) -> bool:
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    return integer and int(value) >= least  # type: ignore[call-overload]


def _share(value: object) -> bool:
    return isinstance(value, Real) and 0 < float(value) <= 1


PREFIX = "EQUIPOISE_"
# Read elsewhere: where runs are kept, how the command line reports its defects.
OTHER_VARIABLES = {
    *("EQUIPOISE_LAB", "EQUIPOISE_RUNS"),
    *("EQUIPOISE_TRACEBACK", "EQUIPOISE_TEST_PROCESSES"),
}

SHORT = {"EQUIPOISE_METRICS": "metrics_port"}
"""Variables whose name is not that of their option."""

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def read_options(given: Mapping[str, Any]) -> WatchOptions:
    """Return the options: arguments over ``EQUIPOISE_*`` over ``equipoise.toml``.

    Raises:
        InputError: If any of them names an option that does not exist.
    """
    given = _without_forecast(given, "forecast=")
    _known(given, "watch")
    found = {**from_file(Path(FILE)), **from_environment(), **given}
    if expected := _expected_in(Path(FILE)):
        own = read_expected(found.get("expect", {}), CHECKS)
        found["expect"] = {**expected, **own}
    return WatchOptions(**found)


def _expected_in(path: Path) -> Expected:
    """Return the ``[checks]`` table: what the project means, in every run."""
    return read_expected(settings_in(path, "checks"), CHECKS, where=f"{path} [checks]")


def _without_forecast(given: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return the options without the forecast, which was removed: accepted, ignored."""
    if "forecast" not in given:
        return given
    _warn_of_forecast(what)
    return {name: value for name, value in given.items() if name != "forecast"}


@cache
def _warn_of_forecast(what: str) -> None:
    """Say once a process that an option does nothing."""
    log.warning(
        "equipoise: %s is ignored: the fitted forecast was removed, because it warned "
        "in 25 of 32 healthy runs (docs/early-warning.md)",
        what,
    )


def from_file(path: Path) -> dict[str, Any]:
    """Return the ``[watch]`` table of a configuration file, if there is one."""
    given = settings_in(path, "watch")
    table = dict(_without_forecast(given, f"{path} [watch] forecast"))
    _known(table, f"{path} [watch]")
    return table


def from_environment() -> dict[str, Any]:
    """Return the options that ``EQUIPOISE_EVERY=20`` and its like set."""
    named = {
        SHORT.get(key, key.removeprefix(PREFIX).lower()): (key, text)
        for key, text in os.environ.items()
        if key.startswith(PREFIX) and key not in OTHER_VARIABLES
    }
    named = dict(_without_forecast(named, "EQUIPOISE_FORECAST"))
    _known(named, "the environment", prefix=PREFIX)
    return {name: _parsed(name, *given) for name, given in named.items()}


def _parsed(name: str, key: str, text: str) -> Any:
    if name not in PARSERS:
        raise InputError(f"{key}: cannot be set from the environment; pass it to watch")
    try:
        return PARSERS[name](text)
    except ValueError as error:
        raise InputError(f"{key}={text!r}: {error}") from error


def _boolean(text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError("give 1 or 0")
    return text.lower() in TRUE


PARSERS: dict[str, Callable[[str], Any]] = {
    "every": int,
    "at": lambda text: tuple(int(word) for word in text.split(",")),
    "dense_start": _boolean,
    "checks": str,
    "budget": float,
    "preset": str,
    "rows": lambda text: text if text == "all" else int(text),
    "strict": _boolean,
    "stop_on": lambda text: tuple(text.split(",")),
    "hold_batch": _boolean,
    "autopilot": lambda text: text if text == "dry-run" else _boolean(text),
    "metrics_port": int,
    "quiet": _boolean,
}


def _known(names: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
    options = [f.name for f in fields(WatchOptions)]
    for name in names:
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.0)[0]
            given = f"{prefix}{name.upper()}" if prefix else name
            meant = f"{prefix}{near.upper()}" if prefix else near
            raise InputError(
                f"{given}: no such option in {where}; the nearest is {meant} "
                f"(all: {', '.join(options)})"
            )


Maker = Callable[[int], Probe]

# Beside the rows of attention, which every preset reads.
MINIMAL: tuple[Maker, ...] = (lambda ranks: GradientNorms(ranks=ranks),)
DEFAULT: tuple[Maker, ...] = (
    *MINIMAL,
    lambda ranks: ProjectionGain(ranks=ranks),
    lambda ranks: Magnitudes(),
    lambda ranks: NormScales(),
    lambda ranks: StreamShape(),
    lambda ranks: BackwardFactors(),
    lambda ranks: Updates(ranks=ranks),
    lambda ranks: UnchangedWeights(),
    lambda ranks: RouterLoad(),
    lambda ranks: MixerGates(),
    lambda ranks: OutputLogits(ranks=ranks),
)


def _deep_probes(ranks: int) -> list[Probe]:
    # Imported here: they load the papers' mathematics, which nothing else needs.
    from equipoise.probes.curvature import Sharpness
    from equipoise.probes.finite_step import FiniteSteps
    from equipoise.probes.lipschitz import LocalLipschitz
    from equipoise.probes.precision import NumericalFragility
    from equipoise.probes.selection import HeadSelection

    return [
        HeadProducts(),
        LocalLipschitz(ranks=ranks),
        HeadSelection(),
        FiniteSteps(),
        NumericalFragility(ranks=ranks),
        Sharpness(),
    ]


def preset_probes(
    preset: str, *, ranks: int = 1, rows: int | Literal["all"] = "all"
) -> list[Probe]:
    """Return the probes of a preset, new."""
    makers = MINIMAL if preset == "minimal" else DEFAULT
    deep = _deep_probes(ranks) if preset == "deep" else []
    attention = AttentionRows(ranks=ranks, rows=rows)
    return [attention, *(make(ranks) for make in makers), *deep]


def one_number_each(given: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """Return scalars that a loop gives, copied: it may go on adding to its tensors.

    Raises:
        InputError: If one of them is not one real number.
    """
    return {name: _one_number(name, value) for name, value in given.items()}


def _one_number(name: str, value: Any) -> Tensor | float:
    what = f"{name}={value!r}"
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach().clone()
        what = f"{name}, a {value.dtype} tensor of shape {tuple(value.shape)},"
    else:
        with suppress(TypeError, ValueError):
            return float(value)
    raise InputError(f"{what} is not one real number: give .step() its mean, say")
