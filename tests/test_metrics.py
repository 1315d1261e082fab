"""Prometheus text from a run: off unless asked for, on loopback, gone with it."""

import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import equipoise
from equipoise.errors import InputError, MissingExtraError
from equipoise.judging.verdict import STATES
from equipoise.records import Finding
from equipoise.sinks.prometheus import Metrics
from equipoise.watching.options import from_environment


def scraped(
    port: int, *, host: str | None = None, path: str = "/metrics"
) -> tuple[int, str]:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    asked.request("GET", path, headers={"Host": host} if host else {})
    answer = asked.getresponse()
    return answer.status, answer.read().decode()


def samples(port: int) -> dict[tuple[str, ...], float]:
    """Return (name, label values but the run's, …) → value; the names must be legal."""
    status, text = scraped(port)
    assert status == 200
    return {
        (one.name, *(v for k, v in sorted(one.labels.items()) if k != "run")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def trained(
    path: Path,
    steps: int,
    meanwhile: Callable[[Any], None],
    **options: Any,
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    with equipoise.watch(layer, optimizer, run=path, every=2, **options) as handle:
        for _ in range(steps):
            layer(torch.randn(2, 4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.flush()
        meanwhile(handle)


def test_a_run_answers_while_it_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = []

    def look(handle: Any) -> None:
        told = capsys.readouterr().err
        ports.append(
            int(told.partition("metrics at http://127.0.0.1:")[2].split("/")[0])
        )
        found = samples(ports[0])
        states = {
            name[1]: v for name, v in found.items() if name[0] == "equipoise_verdict"
        }
        assert states.keys() == {*STATES} and sum(states.values()) == 1
        assert found["equipoise_last_step",] == 5
        assert abs(found["equipoise_last_step_timestamp_seconds",] - time.time()) < 600
        assert 0 < found["equipoise_sampling_ratio",] < 1
        assert found["equipoise_reading", "learning_rate", "all"] == pytest.approx(1e-3)
        low, mean, high = (
            found["equipoise_reading", "attention.theta.p50", sites]
            for sites in ("lowest", "mean", "highest")
        )
        assert 0 < low <= mean <= high <= 1
        assert scraped(ports[0], host="evil.example")[0] == 421
        assert scraped(ports[0], path="/other")[0] == 404

    trained(tmp_path / "a.eqp", 6, look, metrics_port=0)
    with pytest.raises(OSError):
        scraped(ports[0])


def test_off_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    trained(tmp_path / "a.eqp", 2, lambda handle: None)
    assert threading.active_count() == before
    assert "metrics" not in capsys.readouterr().err


def test_two_runs_share_a_port_and_a_hostile_name_stays_a_label() -> None:
    name = 'a"} 1\nequipoise_verdict{run="b'
    one = Metrics(0, run=name, states=STATES)
    two = Metrics(one.port, run="two", states=STATES)
    two.report([Finding(step=0, severity="error", code="x")])
    text = scraped(one.port)[1]
    runs = {
        sample.labels["run"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert runs == {name, "two"}
    assert text.count("# TYPE equipoise_verdict ") == 1
    one.close()
    assert scraped(two.port)[0] == 200
    two.close()
    two.close()
    Metrics(two.port, run="again", states=STATES).close()  # the port is free at once


def test_a_port_that_is_taken_is_refused_before_the_training(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"metrics_port={port}.*give another"):
            trained(tmp_path / "a.eqp", 1, lambda handle: None, metrics_port=port)
    with pytest.raises(InputError, match="metrics_port=-1: a port"):
        trained(tmp_path / "b.eqp", 1, lambda handle: None, metrics_port=-1)


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_METRICS", "9400")
    assert from_environment()["metrics_port"] == 9400


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "equipoise.sinks.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises((MissingExtraError, ModuleNotFoundError), match="metrics"):
        trained(tmp_path / "a.eqp", 1, lambda handle: None, metrics_port=0)
