"""Commands of installed packages come beside ours, and never in their way."""

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise.cli import plugins
from equipoise.cli.subject import subject
from equipoise.errors import InputError, MissingExtraError
from tests.cli.test_cli import run

GOOD = """
HELP = "Say hello."
EXAMPLES = ("equipoise hello",)
def command() -> None:
    print("hello")
"""
SUBJECT = """
import torch
def opened(folder):
    if (folder / "mine").is_file():
        return torch.nn.Linear(2, 2), (torch.ones(1, 2), torch.zeros(1, 2))
"""
Installed = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Install entry points, each ``name="code of its module"``, and no others."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(group: str = plugins.COMMANDS, what: str = "", **modules: str) -> None:
        points = []
        for name, code in modules.items():
            place = f"plugin_{tmp_path.name}_{name}"
            (tmp_path / f"{place}.py").write_text(code)
            points.append(EntryPoint(name.rstrip("_"), place + what, group))
        monkeypatch.setattr(
            plugins,
            "entry_points",
            lambda group: [p for p in points if p.group == group],
        )

    return install


def test_a_command_of_a_package_is_listed_and_runs(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(hello=GOOD)
    assert "Say hello." in run(capsys, "--help")[1]
    assert run(capsys, "hello") == (0, "hello\n", "")


def test_a_broken_package_keeps_no_command_from_working(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(broken="raise RuntimeError('no licence')", hello=GOOD)
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "no licence" in out and "Say hello." in out
    assert run(capsys, "hello") == (0, "hello\n", "")
    assert run(capsys, "rules")[0] == 0
    code, out, err = run(capsys, "broken")
    assert code == InputError.exit_code and err.count("\n") == 1
    assert "RuntimeError: no licence" in err and "repair or uninstall it" in err


def test_a_name_that_is_taken_stays_what_it_is(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(rules=GOOD, hello=GOOD, hello_=GOOD.replace("hello", "other"))
    code, out, err = run(capsys, "--help")
    assert code == 0 and "List the rules" in out and "Say other." not in out
    assert "offers a command 'rules'; that name is taken" in err
    assert "offers a command 'hello'; that name is taken" in err
    assert run(capsys, "hello")[1] == "hello\n"
    assert "hello" not in run(capsys, "rules")[1]


@pytest.mark.parametrize("name", plugins.NOT_INSTALLED)
def test_what_is_not_installed_is_said_with_how_to_install_it(
    name: str, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed()
    package = plugins.NOT_INSTALLED[name]
    code, _, err = run(capsys, name)
    assert code == MissingExtraError.exit_code and err.count("\n") == 1
    assert err.endswith(f"pip install {package}\n")
    code, out, _ = run(capsys, "--help")
    assert code == 0 and f"pip install {package}" in out


def test_a_package_opens_a_folder_of_its_own_format(
    installed: Installed, tmp_path: Path
) -> None:
    installed(group=plugins.SUBJECTS, what=":opened", mine=SUBJECT)
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(InputError, match="has no config.json"):
        subject(str(folder), None)
    (folder / "mine").touch()
    found = subject(str(folder), None)
    assert isinstance(found.model, nn.Linear) and not found.model.training
    assert isinstance(found.batch, torch.Tensor)
    inputs, targets = subject(str(folder), None, targets=True).batch  # type: ignore[misc]
    assert inputs.tolist() == [[1, 1]] and targets.tolist() == [[0, 0]]
    (folder / "config.json").write_text("{}")  # Hugging Face's, so no package is asked
    with pytest.raises(InputError):
        subject(str(folder), None)


def test_a_broken_opener_is_named_and_the_next_is_asked(
    installed: Installed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed(
        group=plugins.SUBJECTS, what=":opened", broken="import no_such", mine=SUBJECT
    )
    (tmp_path / "mine").touch()
    with caplog.at_level(logging.WARNING, "equipoise"):
        assert isinstance(subject(str(tmp_path), None).model, nn.Linear)
    assert "cannot be loaded (ModuleNotFoundError" in caplog.text
