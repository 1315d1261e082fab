"""A training script is judged by its first steps, and nothing of ours stays behind."""

import builtins
import json
import logging
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from typer.testing import CliRunner

from equipoise.auditing.preflight import Setup, _of_a_start, judged, preflight
from equipoise.cli import application
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.judging.rules.starts import STEPS, largest_stable_rate
from equipoise.records import Finding, Reading

SCRIPT = """
import sys, torch
from tests.models import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(width=32, depth=2, heads=2, context=16))
{change}
ramp = lambda step: min(1, (step + 1) / 50)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, ramp)
rng = torch.Generator().manual_seed(0)
for step in range(400):
    x = torch.randint(0, 256, (4, 17), generator=rng).cumsum(1) % 256
    z, y = model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(z, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
open("finished", "w")
"""


def written(folder: Path, change: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(change=change))
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_healthy_script_passes_and_no_file_is_left(tmp_path: Path) -> None:
    hooks, before = (
        len(_global_optimizer_post_hooks),
        {path.name for path in Path().iterdir()},
    )
    found = preflight(written(tmp_path), ["1e-3"], steps=8)
    assert found.verdict.state == "healthy", found.verdict.sentence
    # One more than asked for, so that the last one judged is complete.
    assert found.steps == 9 and found.peak_lr == pytest.approx(1e-3)
    assert found.largest_stable_lr > 1e-3
    assert {path.name for path in Path().iterdir()} - before == {
        "train.py"
    }  # no run, and it was stopped
    assert len(_global_optimizer_post_hooks) == hooks


def test_a_peak_that_is_still_ahead_is_judged(tmp_path: Path) -> None:
    """After 8 of 50 warm-up steps the rate is small; its peak is not."""
    found = preflight(written(tmp_path), ["0.1"], steps=8)
    assert "start.learning_rate" in [f.code for f in found.findings]
    assert len({(f.code, f.site) for f in found.findings}) == len(found.findings)
    (rate,) = (f for f in found.findings if f.code == "start.learning_rate")
    assert f"peak be {found.largest_stable_lr:.2g} or less" in rate.advice
    assert found.largest_stable_lr < found.peak_lr == pytest.approx(0.1)


def test_command_exits_with_the_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loud = "[b.attention.q_proj.weight.data.mul_(99) for b in model.blocks]"
    words = ["preflight", "--steps", "3", str(written(tmp_path, loud)), "1e-3"]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 1
    # The verdict first: what the watch logs step by step is in it.
    assert result.output.startswith("At risk: attention logits reach")
    assert "equipoise: step" not in caplog.text
    assert logging.getLogger("equipoise").level == logging.NOTSET


def test_a_page_and_numbers_are_written(tmp_path: Path) -> None:
    page, data = tmp_path / "p.html", tmp_path / "p.json"
    words = ["preflight", "--steps", "3", "--html", str(page), "--json", str(data)]
    words += [str(written(tmp_path)), "1e-3"]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 0, result.output
    shown, given = page.read_text(), json.loads(data.read_text())
    assert "Run on the first 4 steps of train.py" in shown
    assert "attention.max_logit" in shown and 'href="#max-logit"' in shown
    assert given["verdict"]["state"] == "healthy"
    # Each quantity once, as it was at the last step.
    read = [reading["quantity"] for reading in given["readings"]]
    assert len(read) == len({*read}) > 5
    assert max(reading["step"] for reading in given["readings"]) >= 3


def test_findings_are_named_once() -> None:
    """A run file and its verdict hold the same findings."""
    one = Finding(step=2, severity="warn", code="a", message="a", site="x")
    later, other = replace(one, step=5), replace(one, code="b")
    found = _of_a_start([one, other, later, other])
    assert found == [one, other]


def test_a_script_that_trains_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    with pytest.raises(InputError, match="took no step"):
        preflight(tmp_path / "train.py")


def reading(step: int, quantity: str, *values: float) -> Reading:
    sites = tuple(f"blocks.{i}" for i in range(len(values)))
    return Reading(
        step=step, quantity=quantity, sites=sites, values=tuple((v,) for v in values)
    )


def rules(*readings: Reading, **options: float) -> list[str]:
    judge = Judge(options, of="start")
    early = [one for one in readings if one.step <= STEPS]
    return [finding.code for finding in judge.add_at_once(early)]


@pytest.mark.parametrize(
    ("quantity", "sound", "wrong", "rule"),
    [
        ("update.ratio", (0.01, 0.05), (0.01, 0.07), "start.learning_rate"),
        ("attention.max_logit", (3.0, 49.0), (3.0, 51.0), "start.logits"),
        ("attention.max_logit.sampled", (3.0, 49.0), (3.0, 51.0), "start.logits"),
        ("attention.theta.p50", (0.4, 0.6), (0.4, 0.4), "start.saturated"),
        ("gradient.first_to_last", (0.11,), (0.09,), "start.gradient_ratio"),
        ("gradient.first_to_last", (99.0,), (101.0,), "start.gradient_ratio"),
        ("residual.B", (1.0, 99.0), (1.0, 101.0), "start.depth_scale"),
        ("optimizer.root_v_over_eps", (11.0, 20.0), (9.0, 20.0), "start.adam_epsilon"),
        ("curvature.edge_ratio", (1.9,), (2.1,), "start.sharpness"),
    ],
)
def test_each_rule_begins_at_its_threshold(
    quantity: str, sound: tuple[float, ...], wrong: tuple[float, ...], rule: str
) -> None:
    assert rules(reading(3, quantity, *sound)) == []
    assert rules(reading(3, quantity, *wrong)) == [rule]
    assert rules(reading(21, quantity, *wrong)) == []  # beyond the first steps


def test_the_first_loss_is_compared_with_equal_probabilities() -> None:
    loss = Reading.scalar(0, "loss", 1.6 * math.log(256))
    assert rules(loss, classes=256) == ["start.first_loss"]
    assert rules(loss, classes=0) == [] == rules(loss, classes=4096)


def test_updates_that_rounding_swallows() -> None:
    moved = reading(3, "update.ratio", 1e-3, 2e-3)
    assert rules(moved, roundoff=2**-8) == ["start.rounding"]
    assert rules(moved, roundoff=2**-11) == []


def test_updates_are_put_on_the_scale_of_the_peak() -> None:
    rate = Reading.scalar(3, "learning_rate", 1e-4)
    judge = Judge({"peak_lr": 2e-3}, of="start")
    judge.add_at_once([reading(3, "update.ratio", 0.006), rate])
    assert largest_stable_rate(judge.history) == pytest.approx(1e-3)


def test_a_narrow_format_that_loses_epsilon_is_named() -> None:
    found = judged(Setup(steps=3, lost={"norm": 0.0}), [], [])
    assert [f.code for f in found.findings] == ["start.epsilon"]
    assert found.verdict.state == "at risk"
    assert (
        judged(Setup(steps=3, lost={"norm": 1e-5}), [], []).verdict.state == "healthy"
    )


def test_a_script_that_fails_is_not_called_healthy() -> None:
    assert judged(Setup(steps=3), [], [], code=1).verdict.state == "not judged"
    assert torch.is_grad_enabled()


def test_influence_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def launched(script: Path, arguments: Any, *, report: Any, **options: Any) -> None:
        given.update(options)

    monkeypatch.setattr("equipoise.auditing.preflight.launched", launched)
    with pytest.raises(InputError, match="took no step"):
        preflight(tmp_path / "train.py")
    assert given["checks"] == "active"


QUESTION = "answer = input('Continue? ')"
ENDLESS = "import time\nwhile True:\n    time.sleep(0.05)"


def test_a_script_that_asks_is_told_how(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(QUESTION)
    with pytest.raises(InputError, match="asks at the keyboard"):
        preflight(script)
    assert input is builtins.input


def test_a_script_that_hangs_in_set_up_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("equipoise.auditing.script_limits.SETTING_UP_S", 0.2)
    script = tmp_path / "hangs.py"
    script.write_text(ENDLESS)
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(InputError, match="took no step.*ended after 1 s"):
        preflight(script, seconds=1.0)
    assert "still in set-up" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_that_leaves_by_the_back_door_is_not_passed(
    tmp_path: Path, code: int
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(f"import os\nos._exit({code})")
    words = [sys.executable, "-m", "equipoise", "preflight", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == (code or 1)
    assert f"left by os._exit({code}) after 0 steps" in done.stderr


def test_a_signal_ends_the_script_with_a_line(tmp_path: Path) -> None:
    script = tmp_path / "signalled.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    with pytest.raises(InputError, match="ended by SIGTERM"):
        preflight(script)
