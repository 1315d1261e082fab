"""Checksums and counts of the rows of a run file, and a record of what disagrees.

SQLite trusts its pages: a byte that flipped on a disk is a wrong loss, a lost row, or a
row of another table. So every row carries a CRC-32 of its columns, a row of a series
names the row before it, and the file knows how many there are. What does not agree is
left out and noted, never shown.
"""

import logging
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("equipoise")

Row = tuple[Any, ...]


def checksum(*columns: object) -> int:
    """Return the CRC-32 of a row: its columns as text, a final blob as it is.

    >>> checksum(1, "loss") == zlib.crc32(b"1,loss")
    True
    """
    *head, data = columns
    text = ",".join(map(str, head))
    if isinstance(data, bytes):
        return zlib.crc32(data, zlib.crc32(f"{text};".encode()))
    return zlib.crc32(f"{text},{data}".encode())


def with_checksum(*columns: object) -> Row:
    """Return the row with its checksum as the last column."""
    return (*columns, checksum(*columns))


class Damage:
    """What of a run file is not as it was written; it is skipped by every reader.

    A file of a version without checksums is taken as it is.
    """

    def __init__(self, path: Path, *, checked: bool = True) -> None:
        self._path = path
        self._checked = checked
        self._rows: dict[str, set[object]] = {}
        self.names: dict[int, str] = {}
        """Series → its quantity, for the messages."""

    @property
    def sentences(self) -> list[str]:
        """What is damaged, a sentence each."""
        return [
            f"{what}: {len(keys)} damaged or lost" for what, keys in self._rows.items()
        ]

    def readings(self, series: int) -> str:
        """Return what to call the rows of a series."""
        return f"readings of {self.names.get(series, f'series {series}')}"

    def summaries(self, series: int) -> str:
        """Return what to call the summaries of a series."""
        return f"summaries of {self.names.get(series, f'series {series}')}"

    def note(self, what: str, key: object) -> None:
        """Note that a row is damaged or missing; a row noted twice counts once."""
        if not self._checked:
            return
        if what not in self._rows:
            log.warning("equipoise: %s: %s are damaged; skipped", self._path, what)
        self._rows.setdefault(what, set()).add(key)

    def sound(self, rows: Iterable[Row], what: str, *, key: int = 0) -> list[Row]:
        """Return the rows as written, without their checksum; note the others.

        Args:
            rows: As read, the checksum last.
            what: What they are, for the message.
            key: Which column tells one row from another.
        """
        if not self._checked:
            return [row[:-1] for row in rows]
        kept = []
        for row in rows:
            if checksum(*row[:-1]) == row[-1]:
                kept.append(row[:-1])
            else:
                self.note(what, row[key])
        return kept

    def chain(
        self,
        links: Sequence[tuple[int, int]],
        what: str,
        *,
        after: int,
        until: int | None = None,
    ) -> None:
        """Note what is missing between rows, each of which names the one before it.

        Args:
            links: (row before, row), in order.
            what: What they are, for the message.
            after: The row that comes before them all.
            until: The row that ends them all, where it is known.
        """
        for before, row in links:
            if before > after:
                self.note(what, before)
            after = row
        if until is not None and after < until:
            self.note(what, until)

    def count(self, what: str, found: int, expected: int | None) -> None:
        """Note that there are not as many as were written, if that is known."""
        if expected is not None and found != expected:
            self.note(what, ("count", expected))


class Totals(NamedTuple):
    """How much a file holds."""

    upgraded: int
    """The last id written by a version without checksums; its ids may have gaps."""
    last_id: int
    """Readings and events share one count."""
    series: int
    steps: int
    findings: int
    applied: int


def write_ends(db: sqlite3.Connection, ends: dict[int, int]) -> None:
    """Say which reading is the last of each of some series."""
    rows = [with_checksum(series, last) for series, last in ends.items()]
    db.executemany("REPLACE INTO series_end VALUES (?, ?, ?)", rows)


def series_end(db: sqlite3.Connection, series: int, damage: Damage) -> int | None:
    """Return the last reading of a series; None if that is not known any more."""
    query = "SELECT series, last_id, sum FROM series_end WHERE series = ?"
    rows = damage.sound(db.execute(query, (series,)).fetchall(), "counts")
    if not rows:
        damage.note("counts", series)
        return None
    return int(rows[0][1])


def write_totals(db: sqlite3.Connection, totals: Totals) -> None:
    """Say how much the file holds."""
    row = with_checksum(0, *totals)
    db.execute("REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def totals(db: sqlite3.Connection, damage: Damage) -> Totals | None:
    """Return how much the file holds; None if that is not known any more."""
    rows = damage.sound(db.execute("SELECT * FROM totals").fetchall(), "counts")
    if not rows:
        damage.note("counts", "totals")
        return None
    return Totals(*rows[0][1:])
