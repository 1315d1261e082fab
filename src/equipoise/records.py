"""What an instrument says, once it has left the device. Standard library only."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from equipoise.errors import InputError

Severity = Literal["info", "warn", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warn", "info")
"""The gravest first: the one order in which findings are listed."""
Scalar = str | int | float | bool | None
BEFORE = {"rule": "code", "evidence": "params"}
"""Keys of findings in files written before → the field of today."""


def _plain(value: Any) -> Any:
    """Return plain JSON values; NaN and Inf become text, since browsers refuse them."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table for notebooks: a title, then rows of cells, all escaped.

    >>> html_table("a<b", [("value", 2)])
    '<table><caption>a&lt;b</caption><tr><td>value</td><td>2</td></tr></table>'
    """
    lines = (
        "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{html.escape(title)}</caption>{body}</table>"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:120]!r} stands in it twice")
    return found


def json_object(
    text: str | bytes, holder: object, *, once: bool = False
) -> dict[str, Any]:
    """Return the JSON object of a file; one that holds none is an error with its name.

    >>> json_object("[1]", "config.json")
    Traceback (most recent call last):
    equipoise.errors.InputError: config.json: not a JSON object

    With ``once`` a name that stands twice is an error: JSON keeps the last, in silence.
    """
    try:
        given = json.loads(text, object_pairs_hook=_each_once if once else None)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{holder}: not JSON ({error})") from error
    if not isinstance(given, dict):
        raise InputError(f"{holder}: not a JSON object")
    return given


class Record:
    """To and from one line of JSON; what comes back equals what went in."""

    __slots__ = ()

    def to_json(self) -> str:
        return json.dumps(_plain(asdict(self)), allow_nan=False)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        # A newer writer may know more fields than this reader: the rest is still true.
        return cls(**{key: item for key, item in given.items() if key in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Record):
    """One quantity over all layers or heads of one step."""

    step: int
    quantity: str
    """Dotted, for instance ``attention.theta.p50``."""
    sites: tuple[str, ...]
    """Module names as in ``named_modules()``; ``""`` is the model as a whole."""
    values: tuple[tuple[float, ...], ...]
    """Per site: one value per head, or a single one. NaN and Inf are readings too."""

    def __post_init__(self) -> None:
        if len(self.sites) != len(self.values):
            raise ValueError(
                f"{self.quantity}: {len(self.sites)} sites, {len(self.values)} values"
            )
        object.__setattr__(self, "sites", tuple(self.sites))
        rows = tuple(tuple(map(float, row)) for row in self.values)
        object.__setattr__(self, "values", rows)

    @classmethod
    def scalar(cls, step: int, quantity: str, value: float) -> Self:
        """Return a reading of the model as a whole, such as the loss."""
        return cls(step=step, quantity=quantity, sites=("",), values=((value,),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """Something a person should know, as data: ``text.render`` makes the sentences."""

    step: int
    severity: Severity
    code: str
    """What happened, dotted, as ``nonfinite.forward``; a rule's code is its name."""
    site: str = ""
    """Where: a module's name; ``""`` is the model as a whole."""
    params: dict[str, Scalar] = field(default_factory=dict)
    """The numbers and names of this case, by the names its template uses."""
    message: str = ""
    """The sentence of the day: empty where a finding is made, filled when it leaves."""
    advice: str = ""
    """The next thing to try, filled with the message."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read a finding; older files name code ``rule`` and params ``evidence``."""
        renamed = {BEFORE.get(key, key): item for key, item in given.items()}
        return super(Finding, cls).from_dict(renamed)

    @property
    def since(self) -> int:
        """The step from which it is true: not always the one at which it fired."""
        since = self.params.get("since")
        return int(since) if isinstance(since, int | float) else self.step

    def belongs_to(self, family: str) -> bool:
        """Return whether its code is this one, or begins with it and a dot."""
        return self.code == family or self.code.startswith(f"{family}.")

    @property
    def key(self) -> tuple[str, str, int]:
        """What joins the reports of one event: code, site, and since when."""
        return self.code, self.site, self.since

    def is_grave(self, least: str) -> bool:
        """Return whether its severity is ``least``, or graver.

        >>> Finding.warn(0, "a").is_grave("warn"), Finding.info(0, "a").is_grave("warn")
        (True, False)
        """
        return SEVERITIES.index(self.severity) <= SEVERITIES.index(least)

    @property
    def order(self) -> tuple[int, int]:
        """Its place in a list: the gravest first, then the earliest."""
        return SEVERITIES.index(self.severity), self.step

    @classmethod
    def warn(
        cls,
        step: int,
        code: str,
        message: str = "",
        /,
        *,
        site: str = "",
        advice: str = "",
        **params: Scalar,
    ) -> Self:
        """Return a warning; what is given by another name is a parameter."""
        given = {"code": code, "site": site, "message": message, "advice": advice}
        return cls(step=step, severity="warn", params=params, **given)

    @classmethod
    def error(cls, step: int, code: str, message: str = "", /, **more: Any) -> Self:
        """Return an error; its arguments are those of :meth:`warn`."""
        return replace(cls.warn(step, code, message, **more), severity="error")

    @classmethod
    def info(cls, step: int, code: str, message: str = "", /, **more: Any) -> Self:
        """Return a note; its arguments are those of :meth:`warn`."""
        return replace(cls.warn(step, code, message, **more), severity="info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Record):
    """A remedy that was applied to, or taken back from, a model."""

    step: int
    remedy: str
    site: str = ""
    undone: bool = False
    details: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo(Record):
    """What a run is: written once when the file is made, read by everyone."""

    name: str
    created: str
    """UTC, ISO 8601."""
    version: str
    """Of Equipoise."""
    details: dict[str, Any] = field(default_factory=dict)
    """Model class, parameter count, sites found, options, corpus hash: JSON values."""
