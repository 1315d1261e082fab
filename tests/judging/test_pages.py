"""Every rule has its page, made from the registry; old runs are judged too."""

import json
import shutil
from pathlib import Path

import pytest

from docs import checks
from docs.rules import HERE, pages, texts
from equipoise.cli import main
from equipoise.judging.checks import CHECKS
from equipoise.judging.rules import RULES
from equipoise.store import open_run


def test_pages_are_what_the_registry_says() -> None:
    assert texts().keys() == {r.name for r in RULES.values() if r.of == "run"}
    for name, text in pages().items():
        assert (HERE / name).read_text(encoding="utf-8") == text, "python -m docs.rules"
    assert {path.name for path in HERE.glob("*.md")} == pages().keys()


def test_pages_of_checks_are_what_their_files_say() -> None:
    for name, text in checks.pages().items():
        found = (checks.HERE / name).read_text(encoding="utf-8")
        assert found == text, "python -m docs.checks"
    assert {path.name for path in checks.HERE.glob("*.md")} == checks.pages().keys()
    assert {Path(check.page).name for check in CHECKS.values()} < {*checks.pages()}


def test_the_command_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rules", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == [*RULES, *CHECKS]
    assert all(one["source"] and one["page"] for one in listed)
    assert all(one["measures"] for one in listed[: len(RULES)])
    with pytest.raises(SystemExit):
        main(["rules"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*RULES, *CHECKS))


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_of_an_older_version_is_judged(version: int, tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "store" / "data" / f"version{version}.eqp"
    verdict = open_run(shutil.copy(old, tmp_path)).verdict
    assert verdict.state == "not judged" and verdict.sentence == "no gradient was read"
