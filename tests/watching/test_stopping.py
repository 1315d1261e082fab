"""What a loop does about findings: it stops, and a webhook is told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import equipoise
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.judging.rules import RULES, rule
from equipoise.sinks.webhook import Webhook
from equipoise.watching import Watch
from equipoise.watching.options import _warn_of_forecast, from_environment
from tests.watching.models import TinyModel, batches, declared, objective


def trained(path: Path, steps: int = 12, **options: Any) -> Watch:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        declared(),
        equipoise.watch(
            model, optimizer, run=path, every=1, strict=True, quiet=True, **options
        ) as handle,
    ):
        for batch in batches(steps):
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle.should_stop:
                break
    return handle


@pytest.fixture
def loud() -> Any:
    """A rule that fires at the fourth step."""
    message = "four losses were read"

    @rule(
        "test.loud",
        reads="loss",
        above=3.5,
        persist=1,
        about="loss",
        source="-",
        message=message,
    )
    def count(history: Any) -> float:
        return float(history.curve("loss").count)

    yield
    RULES.pop("test.loud")


def test_the_forecast_that_was_removed_is_accepted_once_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _warn_of_forecast.cache_clear()
    for name in ("a", "b"):
        trained(tmp_path / f"{name}.eqp", steps=2, forecast=True)
    told = [r for r in caplog.records if "forecast" in r.message]
    assert len(told) == 1 and told[0].levelname == "WARNING"
    monkeypatch.setenv("EQUIPOISE_FORECAST", "0")
    assert "forecast" not in from_environment()


def test_a_loop_stops_at_a_rule(tmp_path: Path, loud: None) -> None:
    handle = trained(tmp_path / "a.eqp", stop_on="test.loud")
    assert handle.current_step == 4
    handle._recorder.judge = Judge()  # the rule does not fire any more
    assert handle.should_stop
    assert trained(tmp_path / "b.eqp").current_step == 12
    with pytest.raises(InputError, match="the nearest is failing"):
        trained(tmp_path / "c.eqp", stop_on="failin")


class Hook(BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.received.append(json.loads(self.rfile.read(length)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_a_webhook_gets_warnings_and_no_readings(tmp_path: Path, loud: None) -> None:
    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/hook"
    trained(tmp_path / "a.eqp", sinks=f"webhook:{url}")
    server.shutdown()
    server.server_close()
    (message,) = Hook.received
    assert message["text"] == "step 3: four losses were read"
    assert message["findings"][0]["code"] == "test.loud"


def test_a_server_that_fails_is_a_finding_once(tmp_path: Path, loud: None) -> None:
    def refuse(url: str, text: str) -> None:
        raise ConnectionError(url)

    sink = Webhook("http://127.0.0.1:9/", refuse)
    handle = trained(tmp_path / "a.eqp", sinks=[sink])
    failed = [f for f in handle.findings if f.code == "sink.failed"]
    assert handle.current_step == 12 and len(failed) <= 1
    with pytest.raises(InputError, match="give a URL"):
        Webhook("example.org")
