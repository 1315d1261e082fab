"""Sinks: send readings to the loggers people already use, besides the run file.

A sink is a name (``"wandb"``, ``"jsonl:here.jsonl"``), a callable taking
``(values, step)``, or anything with ``log(values, step)``. Named ones are imported when
asked for; none sends anything off the machine unless it was configured to. What a sink
raises is a finding and never touches the other sinks, the run file or the training.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from equipoise.errors import InputError, MissingExtraError
from equipoise.records import Finding, Reading

log = logging.getLogger("equipoise")

Values = Mapping[str, float]

SINKS = {
    "jsonl": "equipoise.sinks",
    "mlflow": "equipoise.sinks.mlflow",
    "tensorboard": "equipoise.sinks.tensorboard",
    "wandb": "equipoise.sinks.wandb",
    "webhook": "equipoise.sinks.webhook",
}
"""Name → module with ``opened(target) -> Sink``."""
ATTEMPTS = 2
"""How often one step is tried before a sink counts as failing."""
LONGEST_PAUSE = 1024
"""Writes left out, at most, before a failing sink is tried again."""


@runtime_checkable
class Sink(Protocol):
    """Somewhere to send numbers to.

    A ``close()`` is called if there is one, and a ``report(findings)`` too.
    """

    def log(self, values: Values, step: int) -> None:
        """Take the numbers of one step."""
        ...


Given = str | Sink | Callable[[Values, int], object]


class CallableSink:
    """A plain callable as a sink: called with the values and the step."""

    def __init__(self, function: Callable[[Values, int], object]) -> None:
        self._function = function

    def log(self, values: Values, step: int) -> None:
        self._function(values, step)


def check(given: object) -> None:
    """Refuse what cannot be a sink, before a training begins.

    Raises:
        InputError: If it is no known name, no callable and has no ``log``.
    """
    name = given.partition(":")[0] if isinstance(given, str) else None
    if name is None:
        usable = callable(given) or callable(getattr(given, "log", None))
    else:
        usable = name in SINKS
    if not usable:
        raise InputError(
            f"no sink {given!r}: give one of {', '.join(SINKS)} (or NAME:PATH), a "
            "callable taking (values, step), or an object with log(values, step)"
        )


def sink(given: Given, *, run: Path) -> Sink:
    """Return the sink that is meant: a name, ``name:where``, a callable, or a sink.

    Without ``where`` it goes next to the run file, under the run's name. A run of W&B,
    or its module, is used as the name ``wandb`` would be: its own ``log`` takes the
    step for its own.

    sink("jsonl:/tmp/x.jsonl", run=Path("a.eqp"))
    """
    check(given)
    if isinstance(given, str):
        name, _, where = given.partition(":")
        if name == "webhook":  # a URL, not a path
            return _opened(name, where)
        return _opened(name, Path(where) if where else run.with_suffix(""))
    if _is_wandb(given):
        return _opened("wandb", run.with_suffix(""))
    return given if isinstance(given, Sink) else CallableSink(given)


def _is_wandb(given: object) -> bool:
    module = getattr(given, "__name__", None) or type(given).__module__
    return str(module).split(".")[0] == "wandb"


def _opened(name: str, target: Path | str) -> Sink:
    try:
        opened: Sink = import_module(SINKS[name]).opened(target)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        raise MissingExtraError(
            f"the sink {name!r} needs {missing.name}, which is not installed: "
            'pip install "equipoise[loggers]"'
        ) from missing
    return opened


class IsolatedSink:
    """A sink whose failures are findings: tried twice, then after growing pauses."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._pause = self._left_out = 0
        self._reported = False

    def log(self, steps: Mapping[int, Values]) -> list[Finding]:
        """Send the numbers of some steps; return a finding the first time it fails."""
        if self._left_out < self._pause:
            self._left_out += 1
            return []
        for step, values in steps.items():
            error = self._attempt(lambda v=values, s=step: self._sink.log(v, s))  # type: ignore[misc]
            if error is not None:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause or 1)
                self._left_out = 0
                return self._report(step, error)
        self._pause = 0
        return []

    def report(self, findings: Sequence[Finding], step: int) -> list[Finding]:
        """Send findings, if the sink takes them; return one the first time it fails."""
        report: Callable[[Sequence[Finding]], object] | None
        report = getattr(self._sink, "report", None)
        if report is None or not findings:
            return []
        error = self._attempt(lambda: report(findings))
        return [] if error is None else self._report(step, error)

    def close(self, step: int) -> list[Finding]:
        """Let the sink send what it still has."""
        close: Callable[[], object] = getattr(self._sink, "close", lambda: None)
        error = self._attempt(close)
        return [] if error is None else self._report(step, error)

    def _attempt(self, call: Callable[[], object]) -> Exception | None:
        failure: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                call()
            # A boundary: the user's sink may raise anything.
            except Exception as error:
                failure = error
            else:
                return None
        log.debug("equipoise: the sink %s failed", self._name, exc_info=failure)
        return failure

    def _report(self, step: int, error: Exception) -> list[Finding]:
        if self._reported:
            return []
        self._reported = True
        found = {"sink": self._name, "error": repr(error)}
        return [Finding.warn(step, "sink.failed", **found)]


def open_sinks(given: Sequence[Given], *, run: Path) -> list[IsolatedSink]:
    """Return the sinks, each apart from the others; all or none are opened.

    Raises:
        InputError: If one cannot be a sink.
        MissingExtraError: If the library of one is not installed.
    """
    for one in given:
        check(one)
    return [IsolatedSink(_name(one), sink(one, run=run)) for one in given]


def _name(given: Given) -> str:
    if isinstance(given, str):
        return given
    return str(getattr(given, "__name__", type(given).__name__))


def by_step(readings: Iterable[Reading]) -> dict[int, dict[str, float]]:
    """Return step → one number per site, the mean over its heads.

    >>> by_step([Reading(step=1, quantity="q", sites=("a",), values=((1.0, 2.0),))])
    {1: {'q/a': 1.5}}
    """
    steps: dict[int, dict[str, float]] = {}
    for reading in readings:
        here = steps.setdefault(reading.step, {})
        for site, row in zip(reading.sites, reading.values, strict=True):
            if row:
                name = f"{reading.quantity}/{site}" if site else reading.quantity
                here[name] = sum(row) / len(row)
    return steps


def is_sequence(given: Any) -> bool:
    """Say whether these are sinks one by one, and not one sink or its name."""
    return isinstance(given, Sequence) and not isinstance(given, str)


class JsonLines:
    """Appends to a text file; NaN and Inf become text, since JSON has neither."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def log(self, values: Values, step: int) -> None:
        plain = {
            k: v if math.isfinite(v) else repr(float(v)) for k, v in values.items()
        }
        line = json.dumps({"step": step, **plain}, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def opened(target: Path) -> JsonLines:
    """Open ``target``, with ``.jsonl`` where it has no suffix of its own."""
    return JsonLines(target if target.suffix else target.with_suffix(".jsonl"))
