"""How a state and a severity look: one word and one colour each, on every surface.

Standard library only: the board serves its page before it can read a run.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Tone = Literal["healthy", "unknown", "info", "remedy", "warn", "error"]


class Colours(NamedTuple):
    """One tone on a terminal, on a light page and on a dark one."""

    terminal: str
    light: str
    dark: str


class Look(NamedTuple):
    """What a reader sees of a state or a severity."""

    word: str
    tone: Tone


TONES: Mapping[Tone, Colours] = {
    "healthy": Colours("green", "#0b7a4b", "#58cf98"),
    "unknown": Colours("cyan", "#5b6470", "#aab3bf"),
    "info": Colours("cyan", "#33608f", "#86b6ea"),
    "remedy": Colours("green", "#0b7a4b", "#58cf98"),
    "warn": Colours("yellow", "#9a5b00", "#f0b04a"),
    "error": Colours("red", "#c01f2e", "#ff7b84"),
}
"""Every tone has a contrast of 4.5 with the page's paper and cards."""
STATES: Mapping[str, Look] = {
    "healthy": Look("Healthy", "healthy"),
    "not judged": Look("Not judged", "unknown"),
    "at risk": Look("At risk", "warn"),
    "failing": Look("Failing", "error"),
    "dead": Look("Dead", "error"),
}
SEVERITIES: Mapping[str, Look] = {
    "error": Look("Error", "error"),
    "warn": Look("Warning", "warn"),
    "info": Look("Note", "info"),
}
"""The gravest first, as in ``records.SEVERITIES``."""


def terminal(name: str) -> str:
    """Return the colour of a state or a severity on a terminal.

    >>> terminal("at risk") == terminal("warn") == "yellow"
    True
    """
    look = STATES.get(name) or SEVERITIES[name]
    return TONES[look.tone].terminal


def css() -> str:
    """Return the tones as the variables of a page's style, light and dark."""
    light = "".join(f"--{tone}: {c.light}; " for tone, c in TONES.items())
    dark = "".join(f"--{tone}: {c.dark}; " for tone, c in TONES.items())
    return (
        f":root, [data-theme=light] {{ {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
        f"[data-theme=dark] {{ {dark}}}\n"
    )
