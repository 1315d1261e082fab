"""Metrics for Prometheus: ``watch(metrics_port=9400)``, on loopback only.

A daemon thread answers ``GET /metrics``; it reads what the training thread has left, so
a scrape never waits for a step, nor a step for a scrape. All runs of a process that
name one port share it, told apart by the label ``run``.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from equipoise.errors import InputError
from equipoise.records import SEVERITIES, Finding

POLL_S = 0.05
"""Closing waits this long at most."""
LOOPBACK = "127.0.0.1"
NAMES = {LOOPBACK, "localhost", "[::1]"}
"""Hosts that a request may name: a page elsewhere reaches a local port by another."""


class Metrics:
    """The latest numbers of one run, and their place on a port."""

    def __init__(self, port: int, *, run: str, states: Sequence[str]) -> None:
        self.run, self._states = run, states
        self.values: dict[tuple[str, str], float] = {}
        """(quantity, which of its sites) → value; few, however many sites there are."""
        self.findings: Counter[str] = Counter(dict.fromkeys(SEVERITIES, 0))
        self.state, self.step, self.time = "not judged", -1, 0.0
        self.sampling_share: float | None = None
        self._server = _served(port)
        self._server.runs.append(self)
        self.port: int = self._server.server_address[1]

    def stepped(self, step: int, share: float | None) -> None:
        """Take the step that ended, and the share of the time that sampling takes."""
        self.step, self.time, self.sampling_share = step, time.time(), share

    def log(self, values: Mapping[str, float], step: int) -> None:
        sites: dict[str, list[float]] = {}
        for name, value in values.items():
            quantity, _, site = name.partition("/")
            if quantity == "verdict.state":
                self.state = self._states[int(value)]
            elif site:
                sites.setdefault(quantity, []).append(value)
            else:
                self.values[quantity, "all"] = value
        for quantity, found in sites.items():
            self.values[quantity, "lowest"] = min(found)
            self.values[quantity, "highest"] = max(found)
            self.values[quantity, "mean"] = math.fsum(found) / len(found)

    def report(self, findings: Sequence[Finding]) -> None:
        self.findings.update(finding.severity for finding in findings)

    def close(self) -> None:
        if self in self._server.runs:
            self._server.runs.remove(self)
        if not self._server.runs:
            _SERVERS.pop(self.port, None)
            self._server.shut()

    def families(self) -> Iterator[Metric]:
        """Yield the metrics of this run."""
        label, run = ["run"], [self.run]
        state = {one: one == self.state for one in self._states}
        verdict = StateSetMetricFamily("equipoise_verdict", "Its state.", labels=label)
        verdict.add_metric(run, state)
        step = GaugeMetricFamily("equipoise_last_step", "The last step.", labels=label)
        step.add_metric(run, self.step)
        when = GaugeMetricFamily(
            "equipoise_last_step_timestamp_seconds", "When it ended.", labels=label
        )
        when.add_metric(run, self.time)
        yield from (verdict, step, when)
        if self.sampling_share is not None:
            share = GaugeMetricFamily(
                "equipoise_sampling_ratio", "Of the training's time.", labels=label
            )
            share.add_metric(run, self.sampling_share)
            yield share
        found = CounterMetricFamily(
            "equipoise_findings", "What was found.", labels=[*label, "severity"]
        )
        for severity, count in self.findings.items():
            found.add_metric([*run, severity], count)
        reading = GaugeMetricFamily(
            "equipoise_reading", "The latest.", labels=[*label, "quantity", "sites"]
        )
        for names, value in [*self.values.items()]:
            reading.add_metric([*run, *names], value)
        yield from (found, reading)


class _Server(ThreadingHTTPServer):
    """Answers for every run of this process that is on its port."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.runs: list[Metrics] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all runs, each family once."""
        families: dict[str, Metric] = {}
        for family in (f for run in [*self.runs] for f in run.families()):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)
        yield from families.values()

    def describe(self) -> list[Metric]:
        return []

    def shut(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if (host or self.headers.get("Host")) not in NAMES:
            self.send_error(421, "asked under another name than that of this machine")
        elif self.path != "/metrics":
            self.send_error(404, "metrics are at /metrics")
        else:
            body = generate_latest(self.server.registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: standard error belongs to the training."""


_SERVERS: dict[int, _Server] = {}
"""Port → what answers on it in this process."""


def _served(port: int) -> _Server:
    if port in _SERVERS:
        return _SERVERS[port]
    try:
        server = _Server(port)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"metrics_port={port}: {error}; give another, or 0 for any that is free"
        ) from error
    return _SERVERS.setdefault(server.server_address[1], server)
