"""README's own first example trains what it means to: the card is asked."""

import re
from pathlib import Path

import pytest

import equipoise
from equipoise.store import Run

README = Path(__file__).parents[1] / "README.md"
EXAMPLE = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)[
    0
]
TARGETS = "x[:, 1:].flatten()"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUIPOISE_DENSE_START")
    monkeypatch.setenv("EQUIPOISE_RUNS", str(tmp_path))


def trained(code: str, folder: Path) -> Run:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    (run,) = folder.glob("*.eqp")
    return equipoise.open_run(run)


def test_the_first_example_predicts_the_next_token_behind_a_mask(
    tmp_path: Path,
) -> None:
    run = trained(EXAMPLE, tmp_path)
    assert run.verdict.state == "healthy", run.verdict.headline
    assert not [f for f in run.findings if f.belongs_to("check")]
    assert "looks: causal in 4 layers" in run.card.text["Attention"]
    once = "labels are shifted once: each position predicts the next token"
    assert once in run.card.text["Loss"]
    assert "4 of 4 attention layers read" in "\n".join(run.card.opening)


def test_without_its_mask_the_card_says_so_and_the_run_is_failing(
    tmp_path: Path,
) -> None:
    code = EXAMPLE.replace(", mask, is_causal=True", "")
    assert code != EXAMPLE
    run = trained(code, tmp_path)
    assert "looks: both sides in 4 layers" in run.card.text["Attention"]
    assert run.verdict.state == "failing"
    assert run.verdict.lead is not None
    assert run.verdict.lead.code == "check.sees_target"
    assert "shows the model its own targets" in run.verdict.headline


def test_with_targets_that_are_not_shifted_the_card_says_so(tmp_path: Path) -> None:
    assert TARGETS in EXAMPLE
    run = trained(EXAMPLE.replace(TARGETS, "x[:, :-1].flatten()"), tmp_path)
    own = "labels are not shifted: each position predicts its own token"
    assert own in run.card.text["Loss"]
    assert run.verdict.state == "failing" and run.verdict.lead is not None
    assert run.verdict.lead.code == "check.labels_shift"
