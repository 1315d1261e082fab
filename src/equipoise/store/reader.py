"""Read a run file: while it is written, after its writer died, or years later."""

import os
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import schema, summaries
from equipoise.store.level_of_detail import (
    SeriesRange,
    Summary,
    Window,
    by_site,
    in_order,
)
from equipoise.store.packing import Array, Layout, unpack
from equipoise.store.schema import reading

Steps = NDArray[np.int64]
SAME_AS = {"attention.theta.lower": "attention.theta.mean"}
"""Quantity → the one it equals by definition, which is stored in its place."""


@dataclass(frozen=True, slots=True)
class News:
    """What was appended since a cursor, in the order it was written."""

    readings: list[Reading]
    findings: list[Finding]
    applied: list[Applied]


def open_run(path: str | os.PathLike[str]) -> "Run":
    """Return a reader of the run at ``path``.

    It holds nothing open between calls, so it never holds up the writer, may be used
    from any thread or forked process, and always answers with the latest commit.
    """
    return Run(Path(path))


class Run:
    """A run file, seen by a reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path) as db:
            self.version = schema.checked_version(db, path)
            row = db.execute("SELECT value FROM meta WHERE key = 'info'").fetchone()
        self.info = RunInfo.from_json(row[0])

    @property
    def steps(self) -> Steps:
        """Every step with a reading, ascending."""
        with reading(self.path) as db:
            rows = db.execute("SELECT step FROM step ORDER BY step").fetchall()
        return np.array([step for (step,) in rows], np.int64)

    @property
    def quantities(self) -> list[str]:
        with reading(self.path) as db:
            query = "SELECT DISTINCT quantity FROM series ORDER BY quantity"
            return [name for (name,) in db.execute(query)]

    @property
    def findings(self) -> list[Finding]:
        return [Finding.from_json(body) for body in self._events("finding")]

    @property
    def applied(self) -> list[Applied]:
        return [Applied.from_json(body) for body in self._events("applied")]

    def _events(self, kind: str) -> list[str]:
        with reading(self.path) as db:
            query = "SELECT body FROM event WHERE kind = ? ORDER BY id"
            return [body for (body,) in db.execute(query, (kind,))]

    def series(
        self, quantity: str, site: str | None = None
    ) -> dict[str, tuple[Steps, Array]]:
        """Return per site its steps and values, of shape (n,) or (n, heads).

        A step recorded twice (a run resumed from an earlier checkpoint) shows what was
        written last.
        """
        pieces: dict[str, list[tuple[Steps, Array]]] = {}
        for key, layout in self._layouts(quantity).items():
            wanted = {s: c for s, c in layout.columns().items() if site in (None, s)}
            for steps, x_RW in self._rows(key, layout) if wanted else ():
                for name, columns in wanted.items():
                    pieces.setdefault(name, []).append((steps, x_RW[:, columns]))
        self._require(pieces, quantity, site)
        return {name: _joined(parts) for name, parts in pieces.items()}

    def _require(self, found: Sized, quantity: str, site: str | None) -> None:
        if site is not None and not found:
            raise InputError(f"{quantity}: no site {site!r} in {self.path}")

    def _layouts(self, quantity: str) -> dict[int, Layout]:
        with reading(self.path) as db:
            query = "SELECT id, layout FROM series WHERE quantity = ? ORDER BY id"
            found = db.execute(query, (quantity,)).fetchall()
            if not found and quantity in SAME_AS:
                found = db.execute(query, (SAME_AS[quantity],)).fetchall()
        if not found:
            known = ", ".join(self.quantities) or "none yet"
            raise InputError(f"no quantity {quantity!r} in {self.path} (has: {known})")
        return {key: Layout.from_json(line) for key, line in found}

    def _rows(self, key: int, layout: Layout) -> Iterator[tuple[Steps, Array]]:
        """Yield blocks of rows, each its own short transaction: rows never change."""
        last, more = 0, summaries.ROWS_AT_ONCE
        while True:
            with reading(self.path) as db:
                ids, steps, x_RW = summaries.raw(
                    db, key, layout, after=last, limit=more
                )
            if not ids:
                return
            last = ids[-1]
            yield np.array(steps, np.int64), x_RW

    def summary(
        self,
        quantity: str,
        site: str | None = None,
        *,
        points: int = 1000,
        between: Window | None = None,
        level: int | None = None,
    ) -> dict[str, Summary]:
        """Return per site the lowest, mean and highest value over training.

        In at most about ``points`` entries unless a ``level`` is given (0: one per
        reading, over heads; 1: per 16 readings; 2: per 256; …). The time it takes
        depends on the points, not on the length of the run.
        """
        parts: dict[str, list[Summary]] = {}
        for key, layout in self._layouts(quantity).items():
            with reading(self.path) as db:
                schema.complete(db, self.version)
                view = SeriesRange(db, key, layout)
                view = view.within(between) if between else view
                bins = view.bins(view.level(points) if level is None else level)
            for name, part in by_site(bins, layout, between).items():
                if site in (None, name):
                    parts.setdefault(name, []).append(part)
        self._require(parts, quantity, site)
        return {name: in_order(found) for name, found in parts.items()}

    def ends(self, quantity: str) -> tuple[Reading, Reading]:
        """Return the first and the last reading of a quantity, as written."""
        keys = self._layouts(quantity)
        query = (
            "SELECT step, quantity, layout, data FROM reading "
            "JOIN series ON series.id = series WHERE reading.id = ?"
        )
        # One seek in the index per series; a join over them would scan it all.
        end = "SELECT {}(id) FROM reading WHERE series = ?"
        with reading(self.path) as db:
            first = min(db.execute(end.format("min"), (k,)).fetchone() for k in keys)
            last = max(db.execute(end.format("max"), (k,)).fetchone() for k in keys)
            rows = [db.execute(query, found).fetchone() for found in (first, last)]
        return _reading(*rows[0]), _reading(*rows[1])

    def since(self, cursor: int = 0, *, limit: int = 10_000) -> tuple[News, int]:
        """Return up to ``limit`` readings after the cursor, and the next cursor.

        Start at 0 and go on with what you got; nothing new leaves the cursor alone.
        """
        with reading(self.path) as db:
            rows = db.execute(
                "SELECT r.id, step, quantity, layout, data FROM reading AS r "
                "JOIN series ON series.id = series "
                "WHERE r.id > ? ORDER BY r.id LIMIT ?",
                (cursor, limit),
            ).fetchall()
            until = rows[-1][0] if len(rows) == limit else schema.last_id(db)
            events = db.execute(
                "SELECT kind, body FROM event WHERE id > ? AND id <= ? ORDER BY id",
                (cursor, until),
            ).fetchall()
        news = News(
            [_reading(*row[1:]) for row in rows],
            [Finding.from_json(body) for kind, body in events if kind == "finding"],
            [Applied.from_json(body) for kind, body in events if kind == "applied"],
        )
        return news, max(cursor, until)

    def __repr__(self) -> str:
        return f"Run({self.info.name!r}, {str(self.path)!r})"


def _reading(step: int, quantity: str, line: str, data: bytes) -> Reading:
    layout = Layout.from_json(line)
    x_W = unpack([data], layout.width)[0]
    values = tuple(tuple(x_W[c].tolist()) for c in layout.columns().values())
    return Reading(step=step, quantity=quantity, sites=layout.sites, values=values)


def _joined(parts: list[tuple[Steps, Array]]) -> tuple[Steps, Array]:
    """Return one ascending series, the last written row of each step."""
    heads = max(x_RW.shape[1] for _, x_RW in parts)
    steps = np.concatenate([steps for steps, _ in parts])
    x_RW = np.concatenate([_widened(x_RW, heads) for _, x_RW in parts])
    _, last = np.unique(steps[::-1], return_index=True)
    order = len(steps) - 1 - last
    return steps[order], x_RW[order, 0] if heads == 1 else x_RW[order]


def _widened(x_RW: Array, heads: int) -> Array:
    """Return rows of ``heads`` values: NaN where a head did not exist then."""
    missing = heads - x_RW.shape[1]
    return np.pad(x_RW, ((0, 0), (0, missing)), constant_values=np.nan)
