"""One configuration: arguments over environment over file over defaults."""

import inspect
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.errors import InputError
from equipoise.judging.checks.registry import Check
from equipoise.watching.options import (
    CallbackArguments,
    WatchArguments,
    WatchOptions,
    read_options,
)
from tests.watching.models import TinyModel


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


def meant(key: str) -> Check:
    return Check(
        code=f"check.{key}",
        reads=("weights",),
        severity="warn",
        relation="a weight moves",
        reason="one that does not learns nothing",
        expect=key,
        find=lambda facts: [],
    )


@pytest.fixture
def two_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.code: check for check in map(meant, ("frozen", "same_batch"))}
    monkeypatch.setattr("equipoise.watching.options.CHECKS", found)


@pytest.mark.usefixtures("two_checks")
def test_what_is_meant_comes_from_arguments_and_the_file(elsewhere: Path) -> None:
    (elsewhere / "equipoise.toml").write_text(
        '[checks]\nfrozen = "layers.0.*"\n"check.same_batch" = true\n'
    )
    found = read_options({"expect": {"frozen": ["head", "layers.1.*"]}}).expected
    assert found == {"frozen": ("head", "layers.1.*"), "check.same_batch": ("*",)}
    assert read_options({"expect": {"check.same_batch": False}}).expected == {
        "frozen": ("layers.0.*",),
        "check.same_batch": ("*",),
    }
    assert read_options({"stop_on": "check.frozen"}).stop_on == ("check.frozen",)


@pytest.mark.usefixtures("two_checks")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"frozn": "a"}, "frozn.*the nearest are frozen"),
        ({"check.same_bach": True}, "the nearest are check.same_batch, same_batch"),
        ({"frozen": 3}, "3 names no place"),
        ({"frozen": []}, "names no place"),
        ({"frozen": ["a", 1]}, "names no place"),
        (["frozen"], "names of checks and where"),
    ],
)
def test_what_is_meant_is_checked(wrong: object, message: str, elsewhere: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_options({"expect": wrong})


@pytest.mark.usefixtures("two_checks")
def test_the_file_of_what_is_meant_is_named_in_an_error(elsewhere: Path) -> None:
    (elsewhere / "equipoise.toml").write_text("[checks]\nfrozn = true\n")
    with pytest.raises(InputError, match=r"equipoise.toml \[checks\] 'frozn'"):
        read_options({})


@pytest.mark.usefixtures("two_checks")
def test_a_pattern_that_fits_nothing_names_the_nearest(elsewhere: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"layers\.\*.*the nearest are .*blocks"):
        equipoise.watch(model, optimizer, expect={"frozen": "layers.*"})
    for pattern in ("blocks.*", "*.weight", "head", True):
        run = elsewhere / "a.eqp"
        equipoise.watch(model, optimizer, run=run, expect={"frozen": pattern}).close()
        assert equipoise.open_run(run).info.details["expect"]
