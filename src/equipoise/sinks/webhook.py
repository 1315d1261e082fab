"""A webhook: findings as JSON to a URL that the user gives, for people to see.

``webhook:https://example.org/hook`` posts ``{"text": ..., "findings": [...]}`` whenever
a warning or an error is found; readings are not sent. Requests are made by a thread of
their own, so a slow server never delays a training step.
"""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from http.client import HTTPException
from urllib.request import Request, urlopen

from equipoise.errors import InputError
from equipoise.records import Finding
from equipoise.sinks import Values

SECONDS = 5.0
"""How long one request may take, and how long closing waits for the last ones."""
WAITING = 64
"""Messages that may wait; further ones are dropped, and counted as a failure."""


def post(url: str, text: str) -> None:
    """Send one message."""
    request = Request(
        url,
        data=text.encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urlopen(request, timeout=SECONDS):
        pass


class Webhook:
    """Posts warnings and errors; an error of the server is raised at the next one."""

    def __init__(self, url: str, send: Callable[[str, str], None] = post) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"webhook:{url}: give a URL, webhook:https://…")
        self._url, self._send = url, send
        self._messages: queue.Queue[str | None] = queue.Queue(WAITING)
        self._failure: Exception | None = None
        self._last = ""
        self._thread = threading.Thread(target=self._post_all, daemon=True)
        self._thread.start()

    def log(self, values: Values, step: int) -> None:
        """Readings stay where they are."""

    def report(self, findings: Sequence[Finding]) -> None:
        """Post what a person should know; raise what the last request raised.

        A sink is tried twice: what waits already is not sent again.
        """
        grave = [f for f in findings if f.severity != "info"]
        text = _message(grave) if grave else self._last
        if text != self._last:
            self._messages.put_nowait(text)
            self._last = text
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait a little for what is still to be sent."""
        self._messages.put(None)
        self._thread.join(SECONDS)

    def _post_all(self) -> None:
        while (text := self._messages.get()) is not None:
            try:
                self._send(self._url, text)
                self._failure = None
            except (OSError, HTTPException) as error:
                self._failure = error


def _message(findings: Sequence[Finding]) -> str:
    lines = [f"step {f.step}: {f.message}" for f in findings]
    return json.dumps(
        {
            "text": "\n".join(lines),
            "findings": [json.loads(f.to_json()) for f in findings],
        }
    )


def opened(url: str) -> Webhook:
    """Return a sink that posts to a URL."""
    return Webhook(url)
