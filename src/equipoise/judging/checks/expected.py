"""What a user says is meant: ``watch(expect={"frozen": "layers.*"})`` and ``[checks]``.

A key is one that a check declares as its ``expect``, or the code of a check; a value is
a pattern over module and parameter names, several of them, or True for everywhere.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from equipoise.errors import InputError
from equipoise.judging.checks.registry import Check, Violation

Patterns = tuple[str, ...]
Expected = Mapping[str, Patterns]
"""Key → the places at which it is meant."""
EVERYWHERE = "*"


def read_expected(
    given: object, checks: Mapping[str, Check], *, where: str = "expect="
) -> Expected:
    """Return the expected places, by key.

    Raises:
        InputError: If a key names no check, or a value is not made of patterns.
    """
    if not isinstance(given, Mapping):
        raise InputError(
            f"{where}{given!r}: give names of checks and where they are meant, such as "
            'expect={"frozen": "layers.*"} or expect={"same_batch": True}'
        )
    known = keys_of(checks)
    for name in given:
        if name not in known:
            raise InputError(
                f"{where} {name!r}: no check is expected by this name; "
                f"{_nearest(str(name), known)} (equipoise rules lists all)"
            )
    found = {name: _patterns(name, value, where) for name, value in given.items()}
    return {name: patterns for name, patterns in found.items() if patterns}


def keys_of(checks: Mapping[str, Check]) -> dict[str, tuple[Check, ...]]:
    """Return the keys that may be expected, each with the checks that it answers."""
    found: dict[str, tuple[Check, ...]] = {}
    for check in checks.values():
        for key in dict.fromkeys((check.expect, check.code)):
            if key:
                found[key] = (*found.get(key, ()), check)
    return found


def _patterns(name: str, value: Any, where: str) -> Patterns:
    if isinstance(value, bool):
        return (EVERYWHERE,) if value else ()
    several = (value,) if isinstance(value, str) else value
    if isinstance(several, list | tuple | set | frozenset) and several:
        if all(isinstance(one, str) and one for one in several):
            return tuple(several)
    raise InputError(
        f"{where} {name!r}: {value!r} names no place; give True, a pattern such as "
        '"layers.*", or a list of patterns'
    )


def check_places(expected: Expected, names: Collection[str]) -> None:
    """Compare patterns with the names of a model's modules and parameters.

    Raises:
        InputError: If a pattern matches no name.
    """
    for key, patterns in expected.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"expect={{{key!r}: {pattern!r}}}: no module and no parameter of "
                    f"the model has such a name; {_nearest(pattern, names)}"
                )


def _nearest(given: str, known: Iterable[str]) -> str:
    """Return the nearest names, for an error."""
    names = [name for name in known if name]
    near = get_close_matches(given.rstrip(".*"), names, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(near)}" if near else "there are none"


def is_expected(expected: Expected, check: Check, place: Violation) -> bool:
    """Return whether all places of a violation are meant."""
    patterns = [
        pattern
        for key in dict.fromkeys((check.expect, check.code))
        for pattern in expected.get(key, ())
    ]
    if EVERYWHERE in patterns:
        return True
    names = place.places or (place.site,)
    return all(any(fnmatchcase(n, pattern) for pattern in patterns) for n in names)
