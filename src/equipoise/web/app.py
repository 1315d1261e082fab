"""The board's addresses: one page, its two files, and answers about runs.

The page is served at once. What reads runs (NumPy, the store, the rules) takes as long
to import as the web server itself, so it is imported in a thread while the browser
loads the page.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from equipoise.errors import EquipoiseError
from equipoise.report.assets import script, style
from equipoise.web.security import Access, Guard

if TYPE_CHECKING:
    from equipoise.web.api import Handler


LATER_S = 0.05
"""After the start of the server: what reads runs is imported."""


@dataclass(slots=True)
class Answering:
    """The handlers of ``/api``, imported when the board starts to run."""

    directory: Path
    _handlers: "dict[str, Handler] | None" = None
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> "dict[str, Handler]":
        """Return the handlers; the first call imports what they need."""
        with self._guard:
            if self._handlers is None:
                # Here, not above: it would double the time to the first page.
                from equipoise.web.api import handlers

                self._handlers = handlers(self.directory)
            return self._handlers

    async def answer(self, request: Request) -> Response:
        """Answer ``/api/NAME`` and ``/api/NAME/KEY``."""
        known = self._handlers
        if known is None:
            known = await anyio.to_thread.run_sync(self.load)
        handler = known.get(request.path_params["name"])
        if handler is None:
            return PlainTextResponse("no such address\n", 404)
        return await handler(request)


SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Equipoise board</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/style.css">
<script src="/static/page.js" defer></script></head><body>
<a class="skip" href="#main">Skip to the runs</a>
<header><a class="brand" href="/">Equipoise</a><h1 id="title">{title}</h1>
<div id="bar"></div></header><main id="main" tabindex="-1"></main>
<noscript>The board is drawn by a script it serves itself.</noscript></body></html>
"""


async def page(request: Request) -> Response:
    """Answer with the one page; its script reads the address."""
    title = request.path_params.get("key", "Runs")
    return Response(SHELL.format(title=escape(title)), media_type="text/html")


async def static(request: Request) -> Response:
    """Answer with one of the two files the page needs."""
    name = request.path_params["name"]
    if name == "page.js":
        return Response(script(), media_type="text/javascript")
    if name == "style.css":
        return Response(style(), media_type="text/css")
    return PlainTextResponse("no such file\n", 404)


async def _refused(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 404)


async def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"unexpected {type(error).__name__}\n", 500)


def application(directory: Path, access: Access) -> Starlette:
    """Return the board over a directory of runs."""
    answering = Answering(directory)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = threading.Thread(target=answering.load, daemon=True)
        # A little later: the first page must not wait for its turn beside an import.
        asyncio.get_running_loop().call_later(LATER_S, loading.start)
        yield

    handlers = {
        "/": page,
        "/compare": page,
        "/run/{key:path}": page,
        "/static/{name}": static,
        "/api/{name}": answering.answer,
        "/api/{name}/{key:path}": answering.answer,
    }
    return Starlette(
        routes=[Route(path, handler) for path, handler in handlers.items()],
        middleware=[Middleware(Guard, access=access)],
        exception_handlers={EquipoiseError: _refused, Exception: _failed},
        lifespan=lifespan,
    )
