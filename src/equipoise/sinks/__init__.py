"""Sinks: send readings to the loggers people already use, besides the run file.

A sink is anything with ``log(values, step)``. Named ones are imported when asked for;
none sends anything off the machine unless it was configured to.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

from equipoise.errors import InputError, MissingExtraError
from equipoise.records import Reading

Values = Mapping[str, float]

SINKS = {
    "jsonl": "equipoise.sinks.jsonl",
    "mlflow": "equipoise.sinks.mlflow",
    "tensorboard": "equipoise.sinks.tensorboard",
    "wandb": "equipoise.sinks.wandb",
}
"""Name → module with ``opened(target) -> Sink``."""


@runtime_checkable
class Sink(Protocol):
    """Somewhere to send numbers to."""

    def log(self, values: Values, step: int) -> None:
        """Take the numbers of one step."""
        ...

    def close(self) -> None:
        """Send what is still buffered."""
        ...


class CallableSink:
    """A plain callable as a sink: called with the values and the step."""

    def __init__(self, function: Callable[[Values, int], object]) -> None:
        self._function = function

    def log(self, values: Values, step: int) -> None:
        self._function(values, step)

    def close(self) -> None:
        """Do nothing: a function buffers nothing."""


def sink(given: "str | Sink | Callable[[Values, int], object]", *, run: Path) -> Sink:
    """Return the sink that is meant: a name, ``name:where``, a callable, or a sink.

    Without ``where`` it goes next to the run file, under the run's name.

    sink("jsonl:/tmp/x.jsonl", run=Path("a.eqp"))
    """
    if isinstance(given, Sink):
        return given
    if callable(given):
        return CallableSink(given)
    name, _, where = given.partition(":")
    if name not in SINKS:
        raise InputError(
            f"no sink {name!r}: one of {', '.join(SINKS)}, a callable taking "
            "(values, step), or an object with log(values, step) and close()"
        )
    return _opened(name, Path(where) if where else run.with_suffix(""))


def _opened(name: str, target: Path) -> Sink:
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


def scalars(readings: Iterable[Reading]) -> dict[str, float]:
    """Return one number per site, the mean over its heads; loggers draw no arrays.

    >>> scalars([Reading(step=1, quantity="q", sites=("h.0",), values=((1.0, 2.0),))])
    {'q/h.0': 1.5}
    """
    return {
        f"{reading.quantity}/{site}" if site else reading.quantity: sum(row) / len(row)
        for reading in readings
        for site, row in zip(reading.sites, reading.values, strict=True)
        if row
    }
