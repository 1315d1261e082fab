"""Server-sent events: a browser learns that a run has grown, then asks for the rest.

One look at a file's times serves every browser that follows it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from equipoise.web.directory import Directory, Signature, signature

MOST_STREAMS = 200
"""Browsers that follow at once; more are refused."""
LOOK_S = 0.25
BEAT_S = 10.0
"""A line without meaning, so that a closed connection is noticed."""
LONGEST_S = 3600.0
"""A browser connects again after this long by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What a browser follows: one run, or the list of all."""

    path: Path | None
    directory: Directory

    def state(self) -> tuple[Signature, ...]:
        """Return what differs once there is something new."""
        if self.path is not None:
            return (signature(self.path),)
        return tuple(signature(path) for path in self.directory.paths().values())


@dataclass(slots=True)
class LiveStreams:
    """The open streams, and the last look at what each follows."""

    open: int = 0
    _looks: dict[Path | None, tuple[float, int]] = field(default_factory=dict)
    """What is followed → when it was looked at, and a number that grows with it."""
    _states: dict[Path | None, tuple[Signature, ...]] = field(default_factory=dict)

    def number(self, stream: Stream) -> int:
        """Return a number that grows whenever the files change."""
        at, number = self._looks.get(stream.path, (-LOOK_S, 0))
        now = time.monotonic()
        if now - at < LOOK_S / 2:
            return number
        state = stream.state()
        if self._states.get(stream.path) != state:
            self._states[stream.path] = state
            number += 1
        self._looks[stream.path] = (now, number)
        return number

    def response(self, stream: Stream) -> Response:
        """Return the stream, or a refusal where too many are open."""
        if self.open >= MOST_STREAMS:
            return PlainTextResponse(f"{self.open} streams are open: too many\n", 503)
        return StreamingResponse(
            self._lines(stream),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _lines(self, stream: Stream) -> AsyncIterator[str]:
        self.open += 1
        try:
            start = beat = time.monotonic()
            seen = self.number(stream)
            yield f"retry: 2000\ndata: {json.dumps({'changed': seen})}\n\n"
            while time.monotonic() - start < LONGEST_S:
                await asyncio.sleep(LOOK_S)
                number = self.number(stream)
                if number != seen:
                    seen, beat = number, time.monotonic()
                    yield f"data: {json.dumps({'changed': seen})}\n\n"
                elif time.monotonic() - beat > BEAT_S:
                    beat = time.monotonic()
                    yield ": still here\n\n"
        finally:
            self.open -= 1
            if not self.open:
                self._looks.clear()
                self._states.clear()
