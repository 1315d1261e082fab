"""The board shows what the runs hold, follows a live one, and serves nobody else."""

import base64
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from equipoise.errors import InputError
from equipoise.judging.verdict import Verdict
from equipoise.records import Applied, Finding, Reading, RunInfo
from equipoise.report import page_model
from equipoise.store import Run, RunWriter, open_run
from equipoise.web.api import Answers, _names
from equipoise.web.app import application
from equipoise.web.directory import Directory
from equipoise.web.live import Looks
from equipoise.web.security import COOKIE, POLICY, Access
from equipoise.web.server import BoardOptions, prepared
from tests.report.runs import BLOCKS, failing_run, healthy

INFO = RunInfo(name="made", created="now", version="0")
HERE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    (found / "deep").mkdir()
    healthy(found / "pre.eqp", steps=80)
    failing_run(found / "deep" / "post & <b>.eqp", steps=80)
    (found / "broken.eqp").write_bytes(b"not a run")
    return found


FAILING = "deep/post & <b>"


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application(folder, Access()), base_url=HERE) as found:
        yield found


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_the_list_has_every_run_and_its_verdict(client: TestClient) -> None:
    for _ in range(20):
        rows = {row["key"]: row for row in client.get("/api/runs").json()["runs"]}
        if not any(row["stale"] for row in rows.values()):
            break
    assert set(rows) == {"pre", FAILING, "broken"}
    assert rows[FAILING]["verdict"]["state"] in {"at risk", "failing"}
    assert rows[FAILING]["last"] == 79 and rows[FAILING]["state"] == "finished"
    assert "cannot be read" in rows["broken"]["trouble"]


def test_one_run_as_in_the_report(client: TestClient, folder: Path) -> None:
    run = client.get(f"/api/run/{FAILING}").json()
    assert run["steps"] == {"first": 0, "last": 79, "count": 80}
    assert [e["code"] for e in run["events"]] == ["gradient.vanishing"]
    verdict = client.get(f"/api/verdict/{FAILING}").json()
    assert verdict["chart"]["quantity"] == "gradient.norm"
    assert "changes" in client.get(f"/api/changes/{FAILING}").json()
    grid = client.get(
        f"/api/grid/{FAILING}", params={"quantity": "gradient.norm"}
    ).json()
    truth = open_run(folder / f"{FAILING}.eqp").series("gradient.norm")[BLOCKS[3]][1]
    values = unpacked(grid["mean"]).reshape(len(grid["sites"]), -1)
    np.testing.assert_allclose(values[3], truth, rtol=1e-6)


def test_a_window_and_the_heads_of_a_step(client: TestClient) -> None:
    asked = {"quantity": "loss", "points": 10, "from": 20, "to": 29}
    grid = client.get("/api/grid/pre", params=asked).json()
    first = grid.get("first", grid["last"])
    assert len(grid["last"]) <= 10 and first[0] <= 20 and grid["last"][-1] >= 29
    asked = {"quantity": "attention.theta.p5", "step": 41}
    heads = client.get("/api/heads/pre", params=asked).json()
    assert heads["steps"] == [40] and heads["width"] == 4 and len(heads["sites"]) == 24


def test_what_is_new_comes_by_cursor(tmp_path: Path) -> None:
    with (
        TestClient(application(tmp_path, Access()), base_url=HERE) as client,
        RunWriter(tmp_path / "live.eqp", INFO) as writer,
    ):
        writer.append([Reading.scalar(0, "loss", 2.0), Reading.scalar(0, "other", 1.0)])
        run = client.get("/api/run/live").json()
        assert run["state"] == "live" and run["cursor"] == 2
        finding = Finding(step=1, severity="warn", code="r", message="m")
        both = Reading(
            step=1, quantity="loss", sites=("",), values=((3.0, math.nan, 5.0),)
        )
        writer.append(
            [both, Reading.scalar(1, "other", 1.0)],
            findings=[finding],
            applied=[Applied(step=1, remedy="epsilon")],
        )
        asked = {"cursor": run["cursor"], "quantity": ["loss"]}
        news = client.get("/api/since/live", params=asked).json()
        assert [e["kind"] for e in news["events"]] == ["finding", "remedy"]
        (grid,) = news["grids"]
        assert grid["last"] == [1] and grid["broken"] == [[0], [0]]
        planes = [unpacked(grid[name])[0] for name in ("low", "mean", "high")]
        assert planes == [3.0, 4.0, 5.0]
        after = {"cursor": news["cursor"], "quantity": ["loss"]}
        again = client.get("/api/since/live", params=after).json()
        assert again["grids"] == [] and again["cursor"] == news["cursor"]


def test_runs_are_compared(client: TestClient, folder: Path) -> None:
    asked = {"run": ["pre", FAILING], "baseline": "pre"}
    found = client.get("/api/compare", params=asked).json()
    first = next(q for q in found["quantities"] if q["quantity"] == "gradient.norm")
    assert first["parts"] == 0 and first["run"] == "post-LN"
    assert len(found["numbers"][0][1]) == 2
    assert client.get("/api/compare").status_code == 400
    both = {key: open_run(folder / f"{key}.eqp") for key in ("pre", FAILING)}
    assert _names(both) == {"pre": "pre-LN", FAILING: "post-LN"}
    assert _names({"a": both["pre"], "b": both["pre"]}) == {"a": "a", "b": "b"}


def test_the_page_has_no_inline_script_and_escapes(client: TestClient) -> None:
    page = client.get("/run/<script>alert(1)</script>")
    assert page.headers["content-security-policy"] == POLICY
    assert "<script>alert" not in page.text and page.text.count("<script") == 1
    assert "unsafe" not in POLICY
    assert client.get("/static/page.js").status_code == 200
    assert (
        client.get("/static/style.css").headers["content-type"].startswith("text/css")
    )
    assert client.get("/static/other.js").status_code == 404


@pytest.mark.parametrize(
    "key", ["../secret", "..%2fsecret", "/etc/passwd", "deep/../../secret", "missing"]
)
def test_nothing_outside_the_directory_is_read(folder: Path, key: str) -> None:
    outside = folder.parent / "secret.eqp"
    if not outside.exists():
        with RunWriter(outside, INFO) as writer:
            writer.append([Reading.scalar(0, "loss", 1.0)])
        (folder / "link.eqp").symlink_to(outside)
    with TestClient(application(folder, Access()), base_url=HERE) as client:
        for part in ("run", "verdict", "changes", "grid", "heads", "since"):
            assert client.get(f"/api/{part}/{key}").status_code == 404
        assert client.get("/api/run/link").status_code == 404
        assert client.get("/api/changed", params={"run": key}).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8321"}, 200),
        ({"host": "[::1]:8321"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "[broken"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
def test_host_and_origin_are_checked(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    assert client.get("/api/runs", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_board_is_read_only(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


def test_another_interface_asks_for_a_token(folder: Path) -> None:
    access = Access(host="0.0.0.0", token="s3cret")
    app = application(folder, access)
    with TestClient(app, base_url="http://10.0.0.7", follow_redirects=False) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        first = client.get("http://10.0.0.7//evil.example/?token=s3cret&run=a")
        assert first.headers["location"] == "/evil.example/?run=a"
        cookie = first.headers["set-cookie"]
        assert COOKIE in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert client.get("/api/runs").status_code == 200
        # A name of this machine that we cannot know: the token is what is asked for.
        assert client.get("/api/runs", headers={"host": "gpu7.lab"}).status_code == 200
        client.cookies.clear()
        assert client.get("/api/runs", headers={"host": "gpu7.lab"}).status_code == 401


def test_every_address_that_is_printed_answers(folder: Path) -> None:
    board = prepared(BoardOptions(directory=folder, host="0.0.0.0", expose=True))
    board.listener.close()
    app = board.server.config.app
    for address in (board.address, *board.others):
        with TestClient(app, base_url=address.partition("?")[0]) as client:
            assert client.get(address).status_code == 200
            assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("foreign", ["a/b=1", "foo[bar]=1", 'x="', "é=1", "=; ;"])
def test_cookies_of_other_programs_change_nothing(folder: Path, foreign: str) -> None:
    access = Access(host="0.0.0.0", token="s3cret")
    other = Access(host="0.0.0.0", token="of a board on another port")
    with TestClient(application(folder, access), base_url="http://10.0.0.7") as client:
        for given in (foreign, f"{foreign}; {other.cookie}=x"):
            asked = {"cookie": f"{given}; {access.cookie}=s3cret".encode()}
            assert client.get("/api/runs", headers=asked).status_code == 200
            assert (
                client.get("/", headers={"cookie": given.encode()}).status_code == 401
            )


def test_listening_beyond_this_machine_needs_an_option(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--expose"):
        prepared(BoardOptions(directory=tmp_path, host="0.0.0.0"))
    board = prepared(BoardOptions(directory=tmp_path, host="0.0.0.0", expose=True))
    board.listener.close()
    assert "?token=" in board.address
    with pytest.raises(InputError, match="no such directory"):
        prepared(BoardOptions(directory=tmp_path / "none"))


def test_a_port_in_use_is_reported_or_the_next_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="another --port"):
            prepared(BoardOptions(directory=tmp_path, port=port))
    board = prepared(BoardOptions(directory=tmp_path))
    board.listener.close()
    assert board.address.startswith("http://127.0.0.1:")


def test_a_page_asks_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.web.live.LOOK_S", 0.0)
    monkeypatch.setattr("equipoise.web.live.MOST_LOOKS", 2)
    looks, path = Looks(Directory(tmp_path)), tmp_path / "a.eqp"
    with RunWriter(path, INFO) as writer:
        writer.append([Reading.scalar(0, "loss", 1.0)])
        first, every = looks.word(path), looks.word(None)
        assert looks.word(path) == first and looks.word(None) == every
        writer.append([Reading.scalar(1, "loss", 1.0)])
        assert looks.word(path) != first and looks.word(None) != every
    looks.word(tmp_path / "b.eqp")
    assert len(looks._last) == 2


@pytest.mark.parametrize("how", ["moved", "overwritten"])
def test_a_run_that_takes_anothers_name_is_served_whole(
    tmp_path: Path, how: str
) -> None:
    """Both are made in one second, of one length, with other losses."""
    for name, loss in {"old": 1.0, "new": 9.0}.items():
        with RunWriter(tmp_path / f"{name}.eqp", INFO) as writer:
            writer.append([Reading.scalar(step, "loss", loss) for step in range(20)])
    asked = {"quantity": "loss", "points": 10}
    with TestClient(application(tmp_path, Access()), base_url=HERE) as client:
        before = client.get("/api/run/old").json()
        client.get("/api/verdict/old")
        assert (
            unpacked(client.get("/api/grid/old", params=asked).json()["mean"])[0] == 1
        )
        put = shutil.copyfile if how == "overwritten" else shutil.move
        put(tmp_path / "new.eqp", tmp_path / "old.eqp")
        since = {"cursor": before["cursor"], "quantity": "loss"}
        news = client.get("/api/since/old", params=since).json()
        assert news["identity"] != before["identity"]
        assert client.get("/api/run/old").json()["identity"] == news["identity"]
        assert (
            unpacked(client.get("/api/grid/old", params=asked).json()["mean"])[0] == 9
        )
        directory = Directory(tmp_path)
        assert directory.run("old").identity == news["identity"]


def test_pages_hold_no_connection_open() -> None:
    """A browser has six for all tabs of one host."""
    script = (Path(page_model.__file__).parent / "page").glob("*.js")
    assert not re.search(
        "EventSource|WebSocket", "".join(f.read_text() for f in script)
    )


def test_cached_answers_stay_within_their_limit() -> None:
    answers, made = Answers(room=1000), []
    for k in [*range(50), 49, 49]:
        answers.get((k,), lambda k=k: made.append(k) or {"x": "y" * 90})
    assert made == list(range(50)) and answers._size <= 1000 + 100


def test_small_answers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.web.api.MOST_ANSWERS", 5)
    answers = Answers()
    for k in range(20):
        answers.get((k,), dict)
    assert len(answers._kept) == 5 and answers._size == 5 * len("{}")


def test_the_board_answers_over_a_real_socket(folder: Path) -> None:
    board = prepared(BoardOptions(directory=folder, port=0))
    thread = threading.Thread(target=board.run, daemon=True)
    thread.start()
    for _ in range(200):
        time.sleep(0.05)
        if board.server.started:
            break
    answer = httpx.get(f"{board.address}api/run/pre", timeout=60)
    board.server.should_exit = True
    thread.join(60)
    assert answer.json()["label"] == "pre-LN" and not thread.is_alive()


def test_the_page_is_served_before_anything_can_read_a_run() -> None:
    code = (
        "import sys; import equipoise; "
        "assert 'importlib.abc' not in sys.modules, 'doubles the time of importing us';"
        "from equipoise.cli import application; application(['board']); "
        "from equipoise.web.server import prepared; "
        "heavy = {'torch', 'numba', 'numpy', 'jinja2', 'rich'}; "
        "found = heavy & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_address_that_is_not_there(client: TestClient) -> None:
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/api/nothing/pre").status_code == 404


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Return a folder with a run of 200 sampled steps that vanishes from the start."""
    failing_run(tmp_path / "long.eqp", steps=1000)
    return tmp_path


def test_a_large_file_is_judged_from_some_of_its_steps(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = open_run(long / "long.eqp").verdict
    monkeypatch.setattr(page_model, "READ_BYTES", 1000)
    with TestClient(application(long, Access()), base_url=HERE) as client:
        verdict = client.get("/api/verdict/long").json()
    assert "Judged at 80 of 200 sampled steps" in verdict["basis"]
    assert (verdict["state"], verdict["since"]) == (full.state, full.since)
    rules = [finding.code for finding in full.findings]
    assert rules and [f["code"] for f in verdict["findings"]] == rules


def test_after_a_partial_read_the_rest_is_read(long: Path) -> None:
    run = open_run(long / "long.eqp")
    run.skim()
    before = run.verdict
    assert before.state != "dead"
    with RunWriter.resume(long / "long.eqp") as writer:
        writer.append([Reading.scalar(s, "loss", math.nan) for s in range(1000, 1009)])
    assert run.verdict.state == "dead" and run.verdict.since == 1000


def test_the_list_does_not_wait_for_a_slow_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(run: Run) -> Verdict:
        go_on.wait(60)
        return run.verdict

    monkeypatch.setattr("equipoise.web.directory.judged", slow)
    directory = Directory(folder)
    directory.judge(seconds=0.01)
    assert any(directory.row(key)["stale"] for key in directory.paths())
    go_on.set()
    directory.judge(seconds=60)
    assert directory.unjudged() is None


def test_few_large_runs_stay_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_model, "READ_BYTES", 1000)
    monkeypatch.setattr("equipoise.web.directory.OPEN_LARGE", 1)
    directory = Directory(folder)
    first = directory.run("pre")
    assert directory.run("pre") is first
    directory.run(FAILING)
    assert directory.run("pre") is not first
