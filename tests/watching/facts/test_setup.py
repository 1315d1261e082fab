"""The set-up of a run: read once, complete, without a random number or a write."""

import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import equipoise
from equipoise.watching.facts.setup import STATED, SetupFacts, read_setup
from tests.watching.models import TinyModel, trained


def git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(("git", *own, *words), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one script, which is what runs."""
    script = tmp_path / "train.py"
    script.write_text("x = 1\n")
    git(tmp_path, "init", "-q", "-b", "trunk")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    main = SimpleNamespace(__file__=str(script))
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    return tmp_path


def test_git_says_which_code_ran_and_whether_it_was_changed(repository: Path) -> None:
    found = read_setup(TinyModel())["git"]
    assert (found["branch"], found["dirty"], len(found["revision"])) == (
        "trunk",
        False,
        40,
    )
    (repository / "notes.txt").write_text("untracked files change no code")
    assert not read_setup(TinyModel())["git"]["dirty"]
    (repository / "train.py").write_text("x = 2\n")
    assert read_setup(TinyModel())["git"]["dirty"]


def test_without_git_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = read_setup(TinyModel())
    assert "git" not in found and found["versions"]["torch"] == torch.__version__


def test_reading_draws_nothing() -> None:
    model = TinyModel()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    read_setup(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_the_seed_is_the_one_that_was_set() -> None:
    torch.manual_seed(1234)
    torch.rand(3)
    assert read_setup(TinyModel())["seed"] == 1234
    torch.seed()  # drawn: no seed by which a run can be repeated
    assert "seed" not in read_setup(TinyModel())


class Weird:
    def __repr__(self) -> str:
        raise RuntimeError("not for printing")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"a": 1, "b": [1, {"c": torch.float16}]},
            {"a": 1, "b": [1, {"c": "torch.float16"}]},
        ),
        (SimpleNamespace(a=(1, 2), _hidden=3), {"a": [1, 2]}),
        ({"f": torch.relu, "w": Weird()}, {"f": "relu", "w": "Weird"}),
        (None, None),
    ],
)
def test_a_configuration_is_kept_as_plain_values(config: Any, expected: Any) -> None:
    model = nn.Linear(2, 2)
    model.config = config
    assert read_setup(model).get("configuration") == expected


def test_options_in_which_groups_differ_are_listed_group_by_group(
    tmp_path: Path,
) -> None:
    model = TinyModel()
    one, *rest = model.parameters()
    groups: list[dict[str, Any]] = [
        {"params": [one], "lr": 1e-3, "name": "first"},
        {"params": rest, "lr": torch.tensor(0.5)},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    with equipoise.watch(model, optimizer, run=tmp_path / "a.eqp", every=1) as handle:
        model(torch.randint(8, (2, 8))).square().mean().backward()
        optimizer.step()
    (found,) = handle.card.sections["setup"]["optimizers"]
    assert (found["class"], found["groups"]) == ("SGD", 2)
    assert found["options"]["lr"] == [0.001, 0.5]
    assert found["options"]["momentum"] == 0.9
    assert found["options"]["name"] == ["first", None]


def test_it_is_stated_in_the_first_samples_only(tmp_path: Path) -> None:
    facts = SetupFacts()
    facts._anatomy = SimpleNamespace(model=TinyModel())  # type: ignore[assignment]
    assert [bool(facts.facts()) for _ in range(STATED + 2)] == [True] * STATED + [
        False
    ] * 2
    _, handle = trained(TinyModel, run=tmp_path / "a.eqp", steps=30, every=1)
    assert handle is not None
    found = equipoise.open_run(handle.path).card
    assert found.samples == 30 and found.sections["setup"]["ranks"] == 1


@pytest.mark.parametrize(
    ("steps", "quiet", "times"), [(6, False, 1), (6, True, 0), (1, False, 1)]
)
def test_the_card_is_printed_once_in_a_few_lines(
    steps: int, quiet: bool, times: int, tmp_path: Path, capsys: Any
) -> None:
    trained(TinyModel, run=tmp_path / "a.eqp", steps=steps, every=1, quiet=quiet)
    err = capsys.readouterr().err
    assert err.count("AdamW at rate 0.01") == times and len(err.splitlines()) <= 6
