"""The templates: code → message and advice, as ``findings.toml`` declares them.

A template is a :meth:`str.format` string over a finding's parameters, with a few
specs of our own: ``{sites:more}`` is *and 2 more* of three sites, and nothing of one.
"""

import string
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path(__file__).parent
FILES = (
    "findings.toml",
    *sorted(f"checks/{file.name}" for file in (HOME / "checks").glob("*.toml")),
    "rules.toml",
    "weights.toml",
    "starts.toml",
    "verdict.toml",
)
BROKEN = ("nan", "inf", "-inf")
"""How JSON holds numbers that are not finite."""


class Template(NamedTuple):
    """The words of one code."""

    message: str = ""
    advice: str = ""


@cache
def templates() -> Mapping[str, Template]:
    """Return every template by its code."""
    found: dict[str, Template] = {}
    for file in FILES:
        table = tomllib.loads((HOME / file).read_text(encoding="utf-8"))
        found |= {code: Template(**words) for code, words in table.items()}
    return found


def template(code: str, case: object = None) -> Template:
    """Return the words of one case of a code; what it lacks is that of its family.

    >>> template("watch.unread.no_updates").advice
    'everything else is read'
    >>> template("nobody.knows")
    Template(message='', advice='')
    """
    known = templates()
    found = known.get(f"{code}/{case}", Template())
    while code:
        own = known.get(code, Template())
        found = Template(found.message or own.message, found.advice or own.advice)
        code = code.rpartition(".")[0]
    return found


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""


def _after(site: str) -> str:
    return f", after {site}" if site else ""


def _others(count: int) -> str:
    return f" and {count - 1} other norms" if count > 1 else ""


def _times(factor: float) -> str:
    """Return how many times as large something is, as one says it of small ones too.

    >>> _times(3.0), _times(0.2), _times(0.0)
    ('3 times', '1/5 of', 'zero, unlike')
    """
    if factor <= 1e-30:
        return "zero, unlike"
    return f"{factor:.3g} times" if factor >= 1 else f"1/{1 / factor:.3g} of"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _names(given: Iterable[Any]) -> str:
    """Return a list in words; of a long one its first six."""
    names = [str(name) for name in given]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _pairs(given: Mapping[str, Any]) -> str:
    """Return names with their values, but those that are off.

    >>> _pairs({"lr": 0.0003, "betas": [0.9, 0.95], "fused": None, "amsgrad": False})
    'lr 0.0003, betas 0.9/0.95'
    """
    found = {n: v for n, v in given.items() if not (v is None or v is False or v == [])}
    return ", ".join(f"{name} {_brief(value)}" for name, value in found.items())


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"({_pairs(value)})"
    if isinstance(value, list | tuple):
        many = "/…" if len(value) > 6 else ""
        return "/".join(map(_brief, value[:6])) + many
    return str(value)


def _count(number: float) -> str:
    """Return a count in three digits.

    >>> _count(124_439_808), _count(8192), _count(512)
    ('124 M', '8.19 k', '512')
    """
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _percent(share: float) -> str:
    """Return a share in per cent: exact at the ends, where a rounded one would lie.

    >>> _percent(0.0), _percent(0.00001), _percent(0.256), _percent(0.9999), _percent(1)
    ('0 %', 'less than 0.1 %', '25.6 %', 'more than 99.9 %', '100 %')
    """
    if 0 < share < 0.001:
        return "less than 0.1 %"
    if 0.999 < share < 1:
        return "more than 99.9 %"
    return f"{100 * share:.3g} %"


def _often(counts: Any) -> str:
    """Return how often, in words.

    >>> _often([1]), _often([1, 2]), _often([8])
    ('once', 'once or twice', '8 times')
    """
    several = counts if isinstance(counts, list | tuple) else [counts]
    words = {0: "never", 1: "once", 2: "twice"}
    return " or ".join(words.get(n, f"{n} times") for n in several)


SPECS: Mapping[str, Callable[[Any], str]] = {
    "more": _more,
    "after": _after,
    "others": _others,
    "times": _times,
    "plain": _plain,
    "names": _names,
    "pairs": _pairs,
    "brief": _brief,
    "count": _count,
    "percent": _percent,
    "often": _often,
}


class Words(string.Formatter):
    """``str.format`` with our specs; a number that is not finite keeps its name."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "reason":
            return self.vformat(templates()[f"reason.{value}"].message, (), self.words)
        if format_spec in SPECS:
            return SPECS[format_spec](value)
        if format_spec.startswith("n "):  # {groups:n group} is "2 groups"
            return f"{value:g} {format_spec[2:]}{'' if value == 1 else 's'}"
        if value in BROKEN:
            value = float(value)
        found: str = super().format_field(value, format_spec)
        return found


def filled(template: str, words: Mapping[str, Any]) -> str | None:
    """Return a template with its words; None where they do not fit it.

    >>> filled("{site}{sites:more}: cut", {"site": "h.0", "sites": 3})
    'h.0 and 2 more: cut'
    >>> filled("{value:.1f} of {limit}", {"value": 2.0}) is None
    True
    """
    try:
        return Words(words).vformat(template, (), words)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
