"""What the main paper states, section by section, and the checks that judge it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("coverage_emadi.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section, figure or table of the paper."""

    section: str
    says: str
    checks: tuple[str, ...] = ()
    """Names of the checks of its statements."""
    ours: tuple[str, ...] = ()
    """Checks of statements of ours about it."""
    why: str = ""
    """Why it has no check."""
    left: str = ""
    """What it says besides, and why no check judges that."""


def sections() -> list[Section]:
    """Return the table, in the paper's order.

    >>> sections()[0].section
    'Abstract'
    """
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["row"]
    return [
        Section(
            section=row["section"],
            says=row["says"],
            checks=tuple(row.get("checks", ())),
            ours=tuple(row.get("ours", ())),
            why=row.get("why", ""),
            left=row.get("left", ""),
        )
        for row in rows
    ]


def page_rows() -> list[str]:
    """Return the table's lines for the docs page."""
    lines = [
        "| section | what it says | checks |",
        "|---|---|---|",
    ]
    for one in sections():
        names = ", ".join((*one.checks, *(f"{name} (ours)" for name in one.ours)))
        cell = names or one.why
        besides = f"; not judged: {one.left}" if one.left else ""
        lines.append(f"| {one.section} | {one.says} | {cell}{besides} |")
    return lines
