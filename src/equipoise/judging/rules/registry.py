"""Rules: named conditions over readings, each with its threshold and its source.

A rule is a function of the history that returns one number (or None where it cannot
know), and the threshold that number must not pass. Five lines add one:

    @rule("my.loss", reads="loss", above=8.0, source="our last three runs",
          message="the loss is {value:.3g}, above {threshold:g}")
    def high_loss(history):
        return history.scalar("loss")

Our own are declared in the TOML files beside this one and measured by the function that
:func:`measures` names; rules of installed packages are found through the entry point
``equipoise.rules``.
``[rules]`` in ``equipoise.toml`` switches rules off and changes their thresholds.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from equipoise.errors import InputError
from equipoise.judging.history import History
from equipoise.records import Scalar, Severity

Scope = Literal["head", "layer", "parameter", "batch", "model", "rank"]
About = Literal["loss", "model", "watching"]
RuleSubject = Literal["run", "weights", "start"]
FILE = "equipoise.toml"


class Measured(NamedTuple):
    """What a rule found at this step: the number it judges, where, its parameters."""

    value: float
    site: str = ""
    params: Mapping[str, Scalar] = MappingProxyType({})


def measured(value: float, site: str = "", **params: Scalar) -> Measured:
    """Return a measurement, its parameters by name."""
    return Measured(value, site, params)


Measure = Callable[[History], Measured | float | Iterable[Measured] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition: when it begins, when it ends, what it says, and why."""

    name: str
    """Dotted: the family of trouble, then the trouble."""
    reads: tuple[str, ...]
    """The quantities it needs at the same step."""
    measure: Measure = field(compare=False)
    threshold: float
    side: Literal["above", "below"] = "above"
    release: float
    """The value past which it counts as over; between the two nothing changes."""
    persist: int = 3
    """Readings in a row beyond the threshold before it fires."""
    recover: int = 3
    """Readings in a row past ``release`` before it is over."""
    lasts: bool = True
    """Whether it is a state that begins and ends, or an event that is only reported."""
    of: RuleSubject = "run"
    """What it judges: a run, the weights of a checkpoint, or a run's first steps."""
    many: bool = False
    """Whether it finds every place it is true of, or one."""
    severe: float | None = None
    """Beyond this it is ``worse``, whatever ``severity`` says."""
    worse: Severity = "error"
    severity: Severity = "warn"
    scope: Scope = "model"
    about: About = "model"
    source: str
    """Where the threshold is from: theory, a paper, or our calibration."""
    message: str = ""
    """A sentence with ``{value}``, ``{threshold}``, ``{site}`` and what was measured by
    name; the sentences of our own rules are in ``equipoise.text``."""
    remedies: tuple[str, ...] = ()
    """Names in the catalogue of remedies, the one to try first in front."""
    preset: str = ""
    """The preset that takes what it reads, if that is not the default one."""
    applies: str = ""
    """To which models, where that is not all of them; absence is then no gap."""

    @property
    def page(self) -> str:
        """Its own page for a rule over a run; one table each for the other kinds."""
        if self.of != "run":
            return "docs/audit.md" if self.of == "weights" else "docs/preflight.md"
        return f"docs/rules/{self.name.replace('.', '-').replace('_', '-')}.md"

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    def is_beyond(self, value: float, limit: float) -> bool:
        """Return whether a value is beyond a limit; NaN is beyond nothing."""
        return value > limit if self.side == "above" else value < limit


RULES: dict[str, Rule] = {}
"""Name → rule, in the order they are listed."""


def rule(
    name: str,
    *,
    reads: str | tuple[str, ...],
    source: str,
    message: str = "",
    above: float | None = None,
    below: float | None = None,
    release: float | None = None,
    **options: Any,
) -> Callable[[Measure], Measure]:
    """Register the decorated function as a rule.

    Args:
        name: Dotted; taken once.
        reads: The quantities it needs.
        source: Where the threshold is from.
        message: What it says; see :class:`Rule`.
        above: It fires where the value is above this; or
        below: where it is below this. Give one of the two.
        release: Where it is over again; the threshold unless given.
        options: Other fields of :class:`Rule`.

    Raises:
        InputError: If the name is taken, or not exactly one threshold is given.
    """
    if (above is None) == (below is None):
        raise InputError(f"rule {name!r}: give one of above= and below=")
    if name in RULES:
        raise InputError(f"rule {name!r} is registered twice: choose another name")
    limit = above if below is None else below
    assert limit is not None

    def register(measure: Measure) -> Measure:
        RULES[name] = Rule(
            name=name,
            reads=(reads,) if isinstance(reads, str) else reads,
            measure=measure,
            threshold=limit,
            side="above" if below is None else "below",
            release=limit if release is None else release,
            source=source,
            message=message,
            **options,
        )
        return measure

    return register


_MEASURES: dict[str, Measure] = {}
"""Name of a declared rule → the function that returns what it judges."""


def measures(name: str) -> Callable[[Measure], Measure]:
    """Mark the decorated function as the measure of a declared rule."""

    def mark(measure: Measure) -> Measure:
        _MEASURES[name] = measure
        return measure

    return mark


DECLARED: Mapping[str, Mapping[str, Any]] = {
    "run.toml": {},
    "weights.toml": {"of": "weights", "many": True, "persist": 1, "recover": 1},
    "starts.toml": {"of": "start", "persist": 1, "recover": 1},
}
"""File → what its rules have in common."""


def declare(folder: Path) -> None:
    """Register the rules that the files of a folder declare, in their order.

    Raises:
        InputError: If a rule has no measure, or a measure no rule.
    """
    table: dict[str, dict[str, Any]] = {}
    for file, common in DECLARED.items():
        given = tomllib.loads((folder / file).read_text(encoding="utf-8"))
        table |= {name: {**common, **fields} for name, fields in given.items()}
    if alone := table.keys() ^ _MEASURES.keys():
        raise InputError(f"{folder}: a rule or its measure is missing: {alone}")
    for name, fields in table.items():
        lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        rule(name, **{**fields, **lists})(_MEASURES[name])


@cache
def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return what installed packages declare, looked for once: it takes 60 ms."""
    return tuple(metadata.entry_points(group=group))


def load_rules() -> dict[str, Rule]:
    """Return every rule: ours, and those of installed packages.

    A package that cannot be loaded is the user's to know of, not a reason to judge
    nothing: its name is in the error.
    """
    for point in entry_points(group="equipoise.rules"):
        try:
            point.load()
        # A boundary: another package's module may raise anything while it is imported.
        except Exception as error:
            raise InputError(
                f"the rules of {point.value} cannot be loaded: {error!r}; "
                "uninstall that package or repair its entry point equipoise.rules"
            ) from error
    return RULES


SETTINGS = {"threshold", "release", "persist", "recover", "severe", "severity"}


def configured(
    path: Path | None = None, *, of: RuleSubject | None = None
) -> tuple[Rule, ...]:
    """Return the rules in force: ``[rules]`` of ``equipoise.toml`` over the defaults.

    ``"attention.saturated" = false`` switches a rule off; a number is its threshold; a
    table sets any of threshold, release, persist, recover, severe and severity.
    """
    known, path = load_rules(), path or Path(FILE)
    table = _flat(settings_in(path, "rules"))
    for name in table:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            raise InputError(f"{path} [rules]: no rule {name!r}; the nearest is {near}")
    found = (_changed(r, table.get(name, True), path) for name, r in known.items())
    return tuple(r for r in found if r is not None and of in (None, r.of))


def settings_in(path: Path, table: str) -> dict[str, Any]:
    """Return one table of ``equipoise.toml``; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8")).get(table, {})
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    if not isinstance(given, dict):
        raise InputError(f"{path}: [{table}] is a table of names and values")
    return given


def _flat(table: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Return dotted names: TOML reads ``loss.risen = 1`` as a table in a table."""
    found: dict[str, Any] = {}
    for key, item in table.items():
        nested = isinstance(item, dict) and not SETTINGS & item.keys()
        found.update(_flat(item, f"{start}{key}.") if nested else {start + key: item})
    return found


def _changed(rule: Rule, setting: Any, path: Path) -> Rule | None:
    if isinstance(setting, bool):
        return rule if setting else None
    given = setting if isinstance(setting, dict) else {"threshold": setting}
    unknown = given.keys() - SETTINGS
    numbers = {k: v for k, v in given.items() if k != "severity"}
    if unknown or not all(_is_number(v) for v in numbers.values()):
        raise InputError(
            f"{path} [rules] {rule.name} = {setting!r}: give false, a threshold, or a "
            f"table of {', '.join(sorted(SETTINGS))}"
        )
    if "threshold" in given and "release" not in given:
        # The gap between the two stays as wide as it was, as a factor.
        ratio = rule.release / rule.threshold if rule.threshold else 1.0
        given = {**given, "release": float(given["threshold"]) * ratio}
    return replace(rule, **given)


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(float(value))  # type: ignore[arg-type]
