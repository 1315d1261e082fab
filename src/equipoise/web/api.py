"""What the board answers about runs: the list, columns of numbers, what has just come.

Numbers are read in few threads and in as many columns as a screen shows, so that memory
and time do not grow with the run.
"""

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from equipoise.report.changes import changes
from equipoise.report.comparison import compared
from equipoise.report.grids import (
    blocks_of,
    grid,
    grid_json,
    heads_json,
    tails,
)
from equipoise.report.page_model import (
    Json,
    changes_json,
    event_json,
    judged,
    run_json,
    shown_name,
    verdict_json,
)
from equipoise.report.report_model import table
from equipoise.report.run_list import with_columns
from equipoise.store import Run
from equipoise.web.directory import Directory, signature
from equipoise.web.live import Looks

T = TypeVar("T")
READERS = 3
"""Threads that read run files: more would only wait for the disk, and hold memory."""
CACHED_BYTES, MOST_ANSWERS = 24 * 2**20, 2000
"""Of a live run each look is another answer: small ones must not pile up either."""
CHANGE_COLUMNS = 200
LIST_S = 0.4
"""The list waits no longer for verdicts; the page asks again for the rest."""
MOST_POINTS, MOST_COMPARED, MOST_NEWS = 1200, 8, 500


@dataclass(slots=True)
class Answers:
    """Answers that were given, until the run changes or others need the room."""

    room: int = CACHED_BYTES
    _kept: OrderedDict[tuple[Any, ...], bytes] = field(default_factory=OrderedDict)
    _size: int = 0

    def get(self, key: tuple[Any, ...], make: Callable[[], Json]) -> bytes:
        """Return the JSON of an answer, made at most once."""
        found = self._kept.get(key)
        if found is None:
            text = json.dumps(make(), allow_nan=False, separators=(",", ":"))
            found = text.encode()
            self._kept[key] = found
            self._size += len(found)
            while len(self._kept) > 1 and (
                self._size > self.room or len(self._kept) > MOST_ANSWERS
            ):
                _, old = self._kept.popitem(last=False)
                self._size -= len(old)
        return found


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Board:
    """The handlers, over one directory of runs."""

    directory: Directory
    looks: Looks
    answers: Answers = field(default_factory=Answers)
    limiter: anyio.CapacityLimiter | None = None

    async def read(self, work: Callable[[], T]) -> T:
        """Do something in one of the reading threads."""
        self.limiter = self.limiter or anyio.CapacityLimiter(READERS)
        return await anyio.to_thread.run_sync(work, limiter=self.limiter)

    async def runs(self, request: Request) -> Response:
        """Answer with the list; a few lines that are not up to date are read now."""

        def work() -> Json:
            self.directory.judge(seconds=LIST_S)
            rows = [self.directory.row(key) for key in self.directory.paths()]
            return {"directory": self.directory.root.name, **with_columns(rows)}

        return _json(_encoded(await self.read(work)))

    async def run(self, request: Request) -> Response:
        key = request.path_params["key"]

        def work() -> Json:
            run = self.directory.run(key)
            numbers = [[name, cells] for name, cells in table({key: run})]
            described = run_json(run, label=shown_name(run), key=key)
            return {
                **described,
                "numbers": numbers,
                "state": run.state,
                "cursor": run.cursor,
                "identity": run.identity,
            }

        return await self._kept(("run", key), key, work)

    async def verdict(self, request: Request) -> Response:
        key = request.path_params["key"]

        def work() -> Json:
            run = self.directory.run(key)
            return verdict_json(run, judged(run))

        return await self._kept(("verdict", key), key, work)

    async def changes(self, request: Request) -> Response:
        key = request.path_params["key"]

        def work() -> Json:
            run = self.directory.run(key)
            own = [
                grid(run, name, points=CHANGE_COLUMNS, between=None)
                for name in run.quantities
            ]
            verdict = judged(run)
            turned = changes(own, verdict.quantities, verdict.findings)
            return {"changes": changes_json(turned, blocks_of(run))}

        return await self._kept(("changes", key), key, work)

    async def grid(self, request: Request) -> Response:
        key, query = request.path_params["key"], request.query_params
        name = query.get("quantity", "")
        points = max(10, min(MOST_POINTS, _whole(query.get("points"), 400)))
        between = None
        if "from" in query and "to" in query:
            between = (_whole(query["from"], 0), _whole(query["to"], 0))

        def work() -> Json:
            run = self.directory.run(key)
            return grid_json(grid(run, name, points=points, between=between))

        return await self._kept(("grid", key, name, points, between), key, work)

    async def heads(self, request: Request) -> Response:
        key, query = request.path_params["key"], request.query_params
        name, step = query.get("quantity", ""), _whole(query.get("step"), 2**62)

        def work() -> Json:
            run = self.directory.run(key)
            return heads_json([run.near(name, step)], blocks_of(run))

        return await self._kept(("heads", key, name, step), key, work)

    async def since(self, request: Request) -> Response:
        """Answer with what was appended after a cursor, of the quantities asked for."""
        key, query = request.path_params["key"], request.query_params
        cursor, wanted = _whole(query.get("cursor"), 0), query.getlist("quantity")

        def work() -> Json:
            run = self.directory.run(key)
            news, after = run.since(cursor, limit=MOST_NEWS)
            own = [r for r in news.readings if r.quantity in wanted]
            events = [event_json("finding", f) for f in news.findings]
            events += [event_json("remedy", a) for a in news.applied]
            return {
                "cursor": after,
                "more": len(news.readings) >= MOST_NEWS,
                "last": max((r.step for r in news.readings), default=None),
                "grids": [grid_json(one) for one in tails(own, blocks_of(run))],
                "events": events,
                "quantities": sorted({r.quantity for r in news.readings}),
                "state": run.state,
                "identity": run.identity,
            }

        return await self._kept(("since", key, cursor, *sorted(wanted)), key, work)

    async def compare(self, request: Request) -> Response:
        keys = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        baseline = request.query_params.get("baseline", "")

        def work() -> Json:
            opened = {key: self.directory.run(key) for key in keys}
            names = _names(opened)
            runs = {names[key]: run for key, run in opened.items()}
            found = compared(runs, baseline=names.get(baseline, ""))
            return {**found, "numbers": [[n, cells] for n, cells in table(runs)]}

        if not keys:
            return PlainTextResponse("name the runs: ?run=…&run=…\n", 400)
        return await self._kept(("compare", *keys, baseline), keys[0], work)

    async def _kept(
        self, question: tuple[Any, ...], key: str, work: Callable[[], Json]
    ) -> Response:
        def answer() -> bytes:
            now = signature(self.directory.path(key))
            return self.answers.get((*question, now), work)

        return _json(await self.read(answer))

    async def changed(self, request: Request) -> Response:
        """Answer with a word that differs once a run, or the list, has changed."""
        key = request.query_params.get("run")

        def work() -> Json:
            path = None if key is None else self.directory.path(key)
            return {"changed": self.looks.word(path)}

        return _json(_encoded(await self.read(work)))


def _names(runs: Mapping[str, Run]) -> dict[str, str]:
    """Return what to call runs: by name, or by key where two have one name."""
    own = {key: shown_name(run) for key, run in runs.items()}
    return own if len(set(own.values())) == len(own) else {key: key for key in runs}


def _encoded(data: Json) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _json(body: bytes) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(body, media_type="application/json", headers=headers)


def _whole(text: str | None, otherwise: int) -> int:
    try:
        return max(-(2**62), min(2**62, int(float(text or otherwise))))
    except (ValueError, OverflowError):
        return otherwise


def handlers(directory: Path) -> dict[str, Handler]:
    """Return what answers ``/api/NAME`` over a directory of runs."""
    own = Directory(directory)
    board = Board(own, Looks(own))
    return {
        "runs": board.runs,
        "compare": board.compare,
        "changed": board.changed,
        "verdict": board.verdict,
        "changes": board.changes,
        "grid": board.grid,
        "heads": board.heads,
        "since": board.since,
        "run": board.run,
    }
