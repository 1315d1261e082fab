"""Checks: relations that hold in every correct training loop, each with its reason.

A check is a function of the facts of the last sampled steps. It returns every place at
which the relation does not hold now, nothing where it holds, and None where it cannot
be decided, which changes nothing. It has no threshold fitted to runs.

    @finds("check.not_optimised")
    def not_optimised(facts):
        held = facts[-1].section("optimizers")
        ...
        yield violated(site, count=3)

Severity, reason and legal exceptions are declared in the TOML file of the same name.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from equipoise.errors import InputError
from equipoise.judging.facts import Facts
from equipoise.records import Scalar, Severity


class Violation(NamedTuple):
    """One place at which a relation does not hold."""

    site: str = ""
    params: Mapping[str, Scalar] = MappingProxyType({})
    severity: Severity | None = None
    """In place of the check's own, where this case is graver or lighter."""
    places: tuple[str, ...] = ()
    """Every site it stands for, where it stands for several: ``site`` is the first."""


def violated(
    site: str = "",
    *,
    severity: Severity | None = None,
    places: Iterable[str] = (),
    **params: Scalar,
) -> Violation:
    """Return a violation, its parameters by name."""
    return Violation(site, params, severity, tuple(places))


Find = Callable[[Sequence[Facts]], Iterable[Violation] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One relation that must hold."""

    code: str
    """``check.`` and a name."""
    reads: tuple[str, ...]
    """The sections of facts it needs."""
    severity: Severity
    relation: str
    """What must hold, in one sentence."""
    reason: str
    """Why it must."""
    legal: tuple[str, ...] = ()
    """Correct loops that look like a violation, and are none."""
    threads: tuple[str, ...] = ()
    """Public threads in which it was the cause."""
    expect: str = ""
    """The key of ``watch(expect=…)`` by which a user says that it is meant."""
    find: Find = field(compare=False)

    @property
    def page(self) -> str:
        return f"docs/checks/{self.code.removeprefix('check.').replace('_', '-')}.md"


CHECKS: dict[str, Check] = {}
"""Code → check, in the order they are listed."""
_FINDS: dict[str, Find] = {}


def finds(code: str) -> Callable[[Find], Find]:
    """Mark the decorated function as what looks for a declared violation."""

    def mark(find: Find) -> Find:
        _FINDS[code] = find
        return find

    return mark


def declare(module: str) -> None:
    """Register the checks of a module as the TOML file beside it declares them.

    Raises:
        InputError: If a check has no function, or a function no check.
    """
    file = Path(module).with_suffix(".toml")
    table: dict[str, dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    own = {code for code, find in _FINDS.items() if find.__code__.co_filename == module}
    if alone := table.keys() ^ own:
        raise InputError(f"{file}: a check or its function is missing: {alone}")
    for code, given in table.items():
        lists = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        CHECKS[code] = Check(code=code, find=_FINDS[code], **{**given, **lists})
