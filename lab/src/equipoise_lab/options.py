"""Options are frozen dataclasses: read from JSON, checked key by key."""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from equipoise.errors import InputError

T = TypeVar("T")


def from_mapping(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return ``kind(**given)``; a key it does not have is one clear line.

    >>> from equipoise_lab.models import GPTConfig
    >>> from_mapping(GPTConfig, {"widht": 64})
    Traceback (most recent call last):
    equipoise.errors.InputError: GPTConfig has no option 'widht'; did you mean 'width'?
    """
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise InputError(
                f"{kind.__name__} has no option {key!r}{meant(key, sorted(known))}"
            )
    return kind(**{key: _revived(hints[key], item) for key, item in given.items()})


def meant(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about a name that is none of the known."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}"


def _revived(hint: Any, item: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(item, Mapping):
        return from_mapping(hint, item)
    return tuple(item) if isinstance(item, list) else item


def preset(presets: Mapping[str, T], name: str) -> T:
    """Return the options people call by a name."""
    if name not in presets:
        raise InputError(f"no preset {name!r}; there are {', '.join(sorted(presets))}")
    return presets[name]


def added_later(default: Any) -> Any:
    """Return a field added when results exist: at its default it changes no key.

    Finished runs stay finished. The default of such an option must never change.
    """
    return field(default=default, metadata={"added_later": True})


def keyed(options: Any) -> dict[str, Any]:
    """Return what a run's key is made of: every option; one added later, if changed."""
    given = {f: getattr(options, f.name) for f in fields(options)}
    return {
        f.name: keyed(value) if is_dataclass(value) else value
        for f, value in given.items()
        if value != f.default or "added_later" not in f.metadata
    }


def require(holds: bool, message: str) -> None:
    """Raise InputError with ``message`` unless the condition holds."""
    if not holds:
        raise InputError(message)


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise InputError unless ``value`` is one of ``allowed``."""
    listed = ", ".join(str(a) for a in allowed)
    require(value in allowed, f"{name} is {value!r}; it must be one of {listed}")
