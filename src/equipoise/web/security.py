"""Who may ask the board: this machine, or a client with the token; and only to read.

A web page elsewhere can make a browser send requests to a local port (DNS rebinding,
cross-site requests). So the ``Host`` must be ours, a foreign ``Origin`` is refused, and
an interface other than loopback needs a token, which the first visit turns into a
cookie.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARDS = ("0.0.0.0", "::", "")
COOKIE = "equipoise_token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Under which names the board answers, and the token it asks for."""

    host: str = "127.0.0.1"
    token: str | None = None

    @property
    def cookie(self) -> str:
        """The cookie's name: boards on other ports of a machine have others."""
        return (
            f"{COOKIE}_{hashlib.blake2s((self.token or '').encode()).hexdigest()[:8]}"
        )

    def knows(self, host: str) -> bool:
        """Say whether a request was meant for this board.

        >>> Access().knows("localhost:8321"), Access().knows("evil.example:8321")
        (True, False)
        """
        name = _name(host)
        # With a token any name will do, and machines have many: a page that rebinds
        # its own name to us has no cookie of ours.
        return bool(name) and (self.token is not None or name in (*LOOPBACK, self.host))

    def is_allowed(self, given: str | None) -> bool:
        """Say whether a token is the right one; without one anybody here may read."""
        if self.token is None:
            return True
        return given is not None and hmac.compare_digest(
            given.encode(), self.token.encode()
        )


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Guard:
    """Refuses what is not for us before any handler sees it; adds the headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(scope)
        await (answer or self.app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {
            k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]
        }
        if scope["method"] not in {"GET", "HEAD"}:
            return PlainTextResponse("the board is read-only\n", 405)
        host = headers.get("host", "")
        if not self.access.knows(host):
            return PlainTextResponse("unknown host name\n", 421)
        if _is_foreign(headers, host):
            return PlainTextResponse("another site's page may not read runs\n", 403)
        return self._without_token(scope, headers)

    def _without_token(
        self, scope: Scope, headers: Mapping[str, str]
    ) -> Response | None:
        if self.access.is_allowed(_cookie(headers, self.access.cookie)):
            return None
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        given = query.pop("token", [None])[0]
        if not self.access.is_allowed(given):
            return PlainTextResponse(
                "open the address with the token that `equipoise board` printed\n", 401
            )
        rest = urlencode(query, doseq=True)
        there = scope["path"].replace("\\", "/")
        there = f"/{there.lstrip('/')}" + (f"?{rest}" if rest else "")
        answer = RedirectResponse(there, 303)
        answer.set_cookie(
            self.access.cookie, given or "", httponly=True, samesite="strict"
        )
        return answer


def _cookie(headers: Mapping[str, str], wanted: str) -> str | None:
    """Return the value of one cookie, whatever other programs of this host have set.

    Cookies know no port, and a parser of all of them refuses names such as ``a/b``.

    >>> _cookie({"cookie": "a/b=1; foo[bar]=1; ours=t"}, "ours")
    't'
    """
    pairs = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in pairs if name == wanted), None)


def _is_foreign(headers: Mapping[str, str], host: str) -> bool:
    if headers.get("sec-fetch-site") == "cross-site":
        # A link from elsewhere may open the page; nothing else may be fetched.
        return headers.get("sec-fetch-mode") != "navigate"
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != host
