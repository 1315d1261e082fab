"""One configuration: arguments over environment over file over defaults."""

from pathlib import Path

import pytest

from equipoise.errors import InputError
from equipoise.watching.options import WatchOptions, chosen


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults() -> None:
    assert chosen({}) == WatchOptions()


def test_each_place_yields_to_the_one_before(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "equipoise.toml").write_text(
        '[watch]\nevery = 7\nbudget = 0.1\npreset = "minimal"\nat = [3]\n'
    )
    monkeypatch.setenv("EQUIPOISE_BUDGET", "0.05")
    monkeypatch.setenv("EQUIPOISE_STRICT", "on")
    monkeypatch.setenv("EQUIPOISE_PRESET", "deep")
    found = chosen({"preset": "default"})
    assert (found.every, found.budget, found.preset) == (7, 0.05, "default")
    assert found.strict and list(found.at) == [3]


def test_where_runs_live_is_not_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_RUNS", "elsewhere")
    assert chosen({}) == WatchOptions()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("EQUIPOISE_EVRY", "3", "EQUIPOISE_EVRY.*nearest is EQUIPOISE_EVERY"),
        ("EQUIPOISE_EVERY", "often", "EQUIPOISE_EVERY='often'"),
        ("EQUIPOISE_STRICT", "perhaps", "say 1 or 0"),
        ("EQUIPOISE_SINKS", "all", "cannot be set from the environment"),
    ],
)
def test_the_environment_is_checked(
    name: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match=said):
        chosen({})


@pytest.mark.parametrize(
    ("text", "said"),
    [("[watch]\nbudgte = 1\n", "budgte.*nearest is budget"), ("[watch", "not TOML")],
)
def test_the_file_is_checked(text: str, said: str, elsewhere: Path) -> None:
    (elsewhere / "equipoise.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        chosen({})


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"budget": 0.0}, {"budget": 2.0}, {"preset": "all"}, {"at": [-1]}],
)
def test_values_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        chosen(wrong)
