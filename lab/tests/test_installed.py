"""The laboratory is found by the instrument through its entry points alone."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from equipoise.cli import plugins
from equipoise.cli.subject import subject
from equipoise.errors import InputError
from tests.cli.test_cli import run, without_extras
from tests.cli.test_subject import OWN_MODEL
from tests.conftest import PATIENCE

COMMANDS = {point.name for point in entry_points(group=plugins.COMMANDS)}


def test_the_commands_that_the_instrument_points_to_are_these() -> None:
    assert set(plugins.NOT_INSTALLED) == COMMANDS


def test_every_help_works_without_torch_and_has_an_example() -> None:
    below = {"lab": ("list", "run", "report", "theorem"), "storms": ("labels", "score")}
    more = [[name, sub, "--help"] for name, subs in below.items() for sub in subs]
    words = [*([name, "--help"] for name in sorted(COMMANDS)), *more]
    out, err = without_extras(*words)
    assert err == f"{[0] * len(words)}\n"
    assert out.count("Examples:") == len(words)


def test_a_shell_completes_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_EQUIPOISE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "equipoise lab sta")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run(capsys)[1].split() == ["status"]


LOADED = """
import sys
from equipoise.cli import main
for command in sys.argv[1:]:
    try: main([command, "own.py:pair"])
    except SystemExit as left: assert not left.code, command
    print(command, [name for name in sys.modules if name.startswith("equipoise_lab")])
"""


def test_a_users_own_model_does_not_load_the_laboratory(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    commands = ("curvature", "precision", "selection", "audit")  # torch takes seconds
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *commands],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert all(f"{command} []" in printed for command in commands), printed


def test_a_run_of_the_laboratory_is_opened_by_it(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(InputError, match="no run with weights"):
        subject(str(tmp_path), None)
