"""Start the board: an address, a port, a token where one is needed, and a browser."""

import secrets
import socket
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from equipoise.errors import InputError
from equipoise.web.app import application
from equipoise.web.security import LOOPBACK, WILDCARDS, Access

PORT = 8321


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    """Where the board listens, and for whom."""

    directory: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """8321 or the next free one unless given; 0 for any."""
    expose: bool = False
    """Whether an interface other than loopback is meant; a token is then asked for."""
    browser: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBoard:
    """A board that is about to answer at its address."""

    server: uvicorn.Server
    listener: socket.socket
    address: str
    others: tuple[str, ...] = ()
    """Other addresses of the same board, for machines that do not know its name."""

    def run(self) -> None:
        """Answer until it is stopped."""
        with self.listener:
            self.server.run(sockets=[self.listener])


def prepared(options: BoardOptions) -> ReadyBoard:
    """Return the board with its port taken."""
    if not options.directory.is_dir():
        raise InputError(f"{options.directory}: no such directory of runs")
    inside = options.host in LOOPBACK
    if not inside and not options.expose:
        raise InputError(
            f"--host {options.host} lets other machines read your runs: "
            "add --expose to say that you mean it"
        )
    token = None if inside else secrets.token_urlsafe(24)
    listener = _listener(options)
    port = listener.getsockname()[1]
    addresses = [_address(name, port, token) for name in _names(options.host)]
    access = Access(host=options.host, token=token)
    config = uvicorn.Config(
        application(options.directory, access),
        log_level="critical",
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
        h11_max_incomplete_event_size=16_384,
    )
    return ReadyBoard(
        server=uvicorn.Server(config),
        listener=listener,
        address=addresses[0],
        others=tuple(addresses[1:]),
    )


def _names(host: str) -> list[str]:
    """Return what other machines may call this one: its name, then its address."""
    if host not in WILDCARDS:
        return [host]
    names = [socket.gethostname(), _own_address(host)]
    return [name for name in names if name] or ["localhost"]


def _own_address(host: str) -> str:
    """Return the address that packets leave by; nothing without a network.

    A datagram socket that is connected sends nothing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    far = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _address(name: str, port: int, token: str | None) -> str:
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _listener(options: BoardOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    wanted = (
        [options.port] if options.port is not None else [PORT, PORT + 1, PORT + 2, 0]
    )
    for port in wanted:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, port))
        except OSError as error:
            listener.close()
            reason = error.strerror
        else:
            return listener
    raise InputError(f"{options.host}:{wanted[-1]}: {reason}; give another --port")


def open_browser(address: str) -> None:
    """Open the page once the board answers, without waiting for the browser."""
    threading.Timer(0.3, webbrowser.open, [address]).start()
