"""One configuration from four places: arguments, environment, file, defaults."""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from equipoise.errors import InputError
from equipoise.watching.options import WatchOptions

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
