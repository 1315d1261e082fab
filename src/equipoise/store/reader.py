"""Read a run file: while it is written, after its writer died, or years later."""

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError, RunFileError
from equipoise.judging.card import Card
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import Verdict
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.store import schema, summaries, tables
from equipoise.store.checksums import Damage, Row, series_end, totals
from equipoise.store.level_of_detail import (
    SeriesRange,
    Skim,
    Summary,
    Window,
    by_site,
    in_order,
    rows_in_order,
    rows_of,
    skim,
)
from equipoise.store.lock import State, writer_state
from equipoise.store.packing import Array, Layout, unpack
from equipoise.store.schema import reading
from equipoise.text.card import worded as worded_card
from equipoise.text.render import render
from equipoise.text.verdict_text import worded

Steps = NDArray[np.int64]
SAME_AS = {"attention.theta.lower": "attention.theta.mean"}
"""Quantity → the one it equals by definition, which is stored in its place."""
EVENTS = "findings and remedies"
PAGE = 10_000
"""Readings at once when all of a run is gone through."""
FEW = 50
"""Readings at once when they are skimmed: unpacked, 100 kB each in a large model."""


@dataclass(frozen=True, slots=True)
class NewRecords:
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
            self._damage = Damage(path, checked=self.version >= 3)
            schema.look_current(db, self.version)
            query = "SELECT key, value, sum FROM meta WHERE key = 'info'"
            rows = self._damage.sound(db.execute(query).fetchall(), "run information")
            if not rows:
                raise RunFileError(f"{path}: damaged: it does not say what it is")
            self.info = RunInfo.from_json(rows[0][1])
        self.identity = self.identity_now()
        """Which run it is: another file of the same name has another."""
        self._judge: Judge | None = None
        self._judging = threading.Lock()
        self.skimmed: Skim | None = None
        """What the verdict rests on, where the file was not read through for it."""

    def identity_now(self) -> str:
        """Return the identity of the run that is in the file now.

        A file of before it was written is known by what it says it is.
        """
        with reading(self.path) as db:
            schema.look_current(db, schema.checked_version(db, self.path))
            query = "SELECT key, value FROM meta WHERE key IN ('identity', 'info')"
            found = dict(db.execute(query).fetchall())
        info = str(found.get("info", "")).encode()
        return str(found.get("identity") or hashlib.blake2s(info).hexdigest())

    @property
    def damage(self) -> list[str]:
        """What was found not to be as it was written, and skipped, so far."""
        return self._damage.sentences

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with reading(self.path) as db:
            schema.look_current(db, self.version)
            yield db

    @property
    def steps(self) -> Steps:
        """Every step with a reading, ascending."""
        with self._reading() as db:
            query = "SELECT step, time, sum FROM step ORDER BY step"
            rows = self._damage.sound(db.execute(query).fetchall(), "steps")
            counts = totals(db, self._damage)
            self._damage.count("steps", len(rows), counts and counts.steps)
            return np.array([step for step, _ in rows], np.int64)

    @property
    def state(self) -> State:
        """``live`` while it is written, ``stopped`` if its writer died, or finished."""
        return writer_state(self.path)

    @property
    def last_time(self) -> float | None:
        """When the last step was recorded, in seconds since 1970; None without one."""
        with self._reading() as db:
            query = "SELECT step, time, sum FROM step ORDER BY step DESC LIMIT 1"
            rows = self._damage.sound(db.execute(query).fetchall(), "steps")
        return float(rows[0][1]) if rows else None

    @property
    def cursor(self) -> int:
        """The number of the last thing written: ``since`` it there is nothing yet."""
        with self._reading() as db:
            return schema.last_id(db)

    @property
    def quantities(self) -> list[str]:
        with self._reading() as db:
            return sorted({quantity for _, quantity, _ in self._all_series(db)})

    @property
    def findings(self) -> list[Finding]:
        """Everything found; damage of the file, as far as it was met, comes last."""
        found = [render(Finding.from_json(body)) for body in self._events("finding")]
        return [*found, *map(_damage_finding, self.damage)]

    @property
    def applied(self) -> list[Applied]:
        return [Applied.from_json(body) for body in self._events("applied")]

    @property
    def card(self) -> Card:
        """What the loop was seen to do; empty where nothing was recorded of it."""
        with self._reading() as db:
            query = "SELECT key, value, sum FROM meta WHERE key = 'card'"
            rows = self._damage.sound(db.execute(query).fetchall(), "card")
        return worded_card(Card.from_json(rows[0][1])) if rows else Card()

    @property
    def verdict(self) -> Verdict:
        """What is the matter with the run, judged from its readings as they stand.

        Later calls read only what was written since.
        """
        with self._judging:
            self._judge = self._judge or Judge(self.info.details)
            judge = self.judged_by(self._judge)
            judge.unseen = self.card.unseen
            damage = map(_damage_finding, self.damage)
            judge.note(found for found in damage if found not in judge.gaps)
            return worded(judge.verdict)

    def skim(self) -> None:
        """Judge from readings spread over the run, unless it was judged already.

        A verdict on gigabytes then takes seconds; what is written later is all read.
        """
        with self._judging:
            if self._judge is not None:
                return
            judge = Judge(self.info.details, cursor=self.cursor)
            with self._reading() as db:
                known = {k: Layout.from_json(x) for k, _, x in self._all_series(db)}
                chosen = skim(db, known)
                for start in range(0, len(chosen.ids), FEW):
                    page = rows_of(db, chosen.ids[start : start + FEW])
                    sound = self._damage.sound(page, "readings")
                    judge.add(self._known_readings(db, sound))
            bodies = self._events("finding")
            judge.note(render(Finding.from_json(body)) for body in bodies)
            self._judge, self.skimmed = judge, chosen

    def judged_by(self, judge: Judge) -> Judge:
        """Show a judge everything it has not seen yet, in the order of writing."""
        while True:
            # Few at once: 96 layers of 32 heads are 100 kB a reading once unpacked.
            news, cursor = self.since(judge.cursor, limit=PAGE // 20)
            judge.follow(news)
            if cursor == judge.cursor:
                return judge
            judge.cursor = cursor

    def _events(self, kind: str) -> list[str]:
        with self._reading() as db:
            query = "SELECT id, kind, step, body, sum FROM event ORDER BY id"
            rows = self._damage.sound(db.execute(query).fetchall(), EVENTS)
            counts = totals(db, self._damage)
            expected = counts and counts.findings + counts.applied
            self._damage.count(EVENTS, len(rows), expected)
            return [body for _, found, _, body in rows if found == kind]

    def _all_series(self, db: sqlite3.Connection) -> list[tuple[int, str, str]]:
        """Return number, quantity and layout of every series.

        All of them, by number: an index may be damaged too.
        """
        query = "SELECT id, quantity, layout, sum FROM series ORDER BY id"
        rows = self._damage.sound(db.execute(query).fetchall(), "series")
        counts = totals(db, self._damage)
        self._damage.count("series", len(rows), counts and counts.series)
        found = [(key, quantity, layout) for key, quantity, layout in rows]
        self._damage.names.update({key: quantity for key, quantity, _ in found})
        return found

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
        return {name: rows_in_order(parts) for name, parts in pieces.items()}

    def _require(self, found: Sized, quantity: str, site: str | None) -> None:
        if site is not None and not found:
            raise InputError(f"{quantity}: no site {site!r} in {self.path}")

    def _layouts(self, quantity: str) -> dict[int, Layout]:
        with self._reading() as db:
            known = self._all_series(db)
        names = {name for _, name, _ in known}
        stored = quantity if quantity in names else SAME_AS.get(quantity, quantity)
        found = {k: Layout.from_json(line) for k, q, line in known if q == stored}
        if not found:
            has = ", ".join(sorted(names)) or "none yet"
            raise InputError(f"no quantity {quantity!r} in {self.path} (has: {has})")
        return found

    def _rows(self, key: int, layout: Layout) -> Iterator[tuple[Steps, Array]]:
        """Yield blocks of rows, each its own short transaction: rows never change."""
        last, more = 0, summaries.ROWS_AT_ONCE
        while True:
            with self._reading() as db:
                rows = summaries.raw(
                    db, key, layout, damage=self._damage, after=last, limit=more
                )
            if not rows.end:
                return
            last = rows.end
            yield np.array(rows.steps, np.int64), rows.values

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
            with self._reading() as db:
                schema.add_summaries(db, self.version)
                view = SeriesRange(db, key, layout, self._damage)
                view = view.within(between) if between else view
                bins = view.bins(view.level(points) if level is None else level)
            for name, part in by_site(bins, layout, between).items():
                if site in (None, name):
                    parts.setdefault(name, []).append(part)
        self._require(parts, quantity, site)
        return {name: in_order(found) for name, found in parts.items()}

    def near(self, quantity: str, step: int) -> Reading:
        """Return the reading of a quantity whose step is nearest to one, as written."""
        found: list[Reading] = []
        for key, layout in self._layouts(quantity).items():
            with self._reading() as db:
                schema.add_summaries(db, self.version)
                row = SeriesRange(db, key, layout, self._damage).nearest(step)
            if row is not None:
                found.append(_as_reading(quantity, layout, *row))
        if not found:
            raise RunFileError(f"{self.path}: damaged: no reading of {quantity}")
        return min(reversed(found), key=lambda reading: abs(reading.step - step))

    def ends(self, quantity: str) -> tuple[Reading, Reading]:
        """Return the first and the last reading of a quantity, as written."""
        found: list[tuple[int, Reading]] = []
        for key, layout in self._layouts(quantity).items():
            with self._reading() as db:
                rows = self._first_and_last(db, key, layout)
            found += [(row[0], _reading(quantity, layout, row)) for row in rows]
        if not found:
            raise RunFileError(f"{self.path}: damaged: no reading of {quantity}")
        ordered = sorted(found, key=lambda pair: pair[0])
        return ordered[0][1], ordered[-1][1]

    def _first_and_last(
        self, db: sqlite3.Connection, key: int, layout: Layout
    ) -> list[Row]:
        # One seek in the index each; a join over the series would scan it all.
        query = (
            "SELECT id, series, step, prev, data, sum FROM reading "
            "WHERE id = (SELECT {}(id) FROM reading WHERE series = ?)"
        )
        ends = [db.execute(query.format(f), (key,)).fetchone() for f in ("min", "max")]
        what = self._damage.readings(key)
        rows = self._damage.sound([row for row in ends if row is not None], what)
        last = series_end(db, key, self._damage)
        if len(rows) == 2 and not rows[0][3] and rows[1][0] == (last or rows[1][0]):
            return rows
        if self.version < 3:
            return rows
        # An end is damaged: look for the first and last that is not.
        query = "SELECT id, series, step, prev, data, sum FROM reading WHERE series = ?"
        found = db.execute(f"{query} ORDER BY id", (key,)).fetchall()
        rows = self._damage.sound(found, what)
        links = [(row[3], row[0]) for row in rows]
        self._damage.chain(links, what, after=0, until=last)
        return [rows[0], rows[-1]] if rows else []

    def since(self, cursor: int = 0, *, limit: int = PAGE) -> tuple[NewRecords, int]:
        """Return up to ``limit`` readings after the cursor, and the next cursor.

        Start at 0 and go on with what you got; nothing new leaves the cursor alone.
        """
        with self._reading() as db:
            query = (
                "SELECT id, series, step, prev, data, sum FROM reading "
                "WHERE id > ? ORDER BY id LIMIT ?"
            )
            found = db.execute(query, (cursor, limit)).fetchall()
            counts = totals(db, self._damage)
            end = schema.last_id(db) if counts is None else counts.last_id
            until = found[-1][0] if len(found) == limit else end
            query = (
                "SELECT id, kind, step, body, sum FROM event "
                "WHERE id > ? AND id <= ? ORDER BY id"
            )
            events = db.execute(query, (cursor, until)).fetchall()
            readings = self._known_readings(db, self._damage.sound(found, "readings"))
        sound = self._damage.sound(events, EVENTS)
        if counts is not None:
            after = max(cursor, counts.upgraded)
            ids = {row[0] for row in (*found, *events) if row[0] > after}
            self._damage.count("readings", len(ids), max(0, until - after))
        news = NewRecords(
            readings,
            [render(Finding.from_json(x[3])) for x in sound if x[1] == "finding"],
            [Applied.from_json(row[3]) for row in sound if row[1] == "applied"],
        )
        return news, max(cursor, until)

    def _known_readings(self, db: sqlite3.Connection, rows: list[Row]) -> list[Reading]:
        """Return the readings of the rows whose series is known."""
        if not rows:
            return []
        known = {k: (q, Layout.from_json(line)) for k, q, line in self._all_series(db)}
        for row in rows:
            if row[1] not in known:
                self._damage.note("readings", row[0])
        return [_reading(*known[row[1]], row) for row in rows if row[1] in known]

    to_pandas = tables.to_pandas
    to_polars = tables.to_polars
    to_arrow = tables.to_arrow
    _repr_html_ = tables.run_html

    def __repr__(self) -> str:
        try:
            steps = self.steps
        except RunFileError:  # deleted or damaged meanwhile: still something to print
            return f"Run({self.info.name!r}, unreadable, {str(self.path)!r})"
        last = f"step {steps[-1]}" if len(steps) else "no step yet"
        return f"Run({self.info.name!r}, {self.state}, {last}, {str(self.path)!r})"


def _reading(quantity: str, layout: Layout, row: Row) -> Reading:
    _, _, step, _, data = row
    return _as_reading(quantity, layout, step, unpack([data], layout.width)[0])


def _as_reading(quantity: str, layout: Layout, step: int, x_W: Array) -> Reading:
    values = tuple(tuple(x_W[c].tolist()) for c in layout.columns().values())
    return Reading(step=step, quantity=quantity, sites=layout.sites, values=values)


def _damage_finding(error: str) -> Finding:
    """Return what cannot be read of a file as a finding of its run."""
    return render(Finding.error(0, "store.damaged", error=error))
