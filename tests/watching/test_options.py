"""One configuration: arguments over environment over file over defaults."""

import inspect
from pathlib import Path

import pytest

import equipoise
from equipoise.errors import InputError
from equipoise.watching.options import (
    CallbackArguments,
    WatchArguments,
    WatchOptions,
    read_options,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DENSE_START")
    return tmp_path


def test_defaults() -> None:
    assert read_options({}) == WatchOptions()


def test_arguments_override_environment_and_file(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "equipoise.toml").write_text(
        '[watch]\nevery = 7\nbudget = 0.1\npreset = "minimal"\nat = [3]\n'
    )
    monkeypatch.setenv("EQUIPOISE_BUDGET", "0.05")
    monkeypatch.setenv("EQUIPOISE_STRICT", "on")
    monkeypatch.setenv("EQUIPOISE_PRESET", "deep")
    found = read_options({"preset": "default"})
    assert (found.every, found.budget, found.preset) == (7, 0.05, "default")
    assert found.strict and list(found.at) == [3]


def test_where_runs_live_is_not_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_RUNS", "elsewhere")
    assert read_options({}) == WatchOptions()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("EQUIPOISE_EVRY", "3", "EQUIPOISE_EVRY.*nearest is EQUIPOISE_EVERY"),
        ("EQUIPOISE_EVERY", "often", "EQUIPOISE_EVERY='often'"),
        ("EQUIPOISE_STRICT", "perhaps", "give 1 or 0"),
        ("EQUIPOISE_SINKS", "all", "cannot be set from the environment"),
    ],
)
def test_the_environment_is_checked(
    name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=message):
        read_options({})


@pytest.mark.parametrize(
    ("text", "message"),
    [("[watch]\nbudgte = 1\n", "budgte.*nearest is budget"), ("[watch", "not TOML")],
)
def test_the_file_is_checked(text: str, message: str, elsewhere: Path) -> None:
    (elsewhere / "equipoise.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_options({})


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"budget": 0.0}, {"budget": 2.0}, {"preset": "all"}, {"at": [-1]}],
)
def test_values_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        read_options(wrong)


def test_callbacks_take_every_argument_of_watch_but_the_model() -> None:
    of_watch = set(inspect.signature(equipoise.watch).parameters)
    own = set(CallbackArguments.__annotations__) - set(WatchArguments.__annotations__)
    assert own == of_watch - {"model", "optimizer", "options"}
