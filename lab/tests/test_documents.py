"""What the documents show can be run as it stands, and what they point at is there."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import equipoise
from docs.generate import PAGES as GENERATED
from equipoise.anatomy.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


TUTORIAL = ROOT / "docs" / "tutorial.md"
"""Its blocks belong together, so they run as one."""
BLOCKS = [
    pytest.param(
        "".join(FENCE.findall(TUTORIAL.read_text(encoding="utf-8"))), id="tour"
    )
] + [
    pytest.param(code, id=f"{named(page)}:{i}")
    for page in PAGES
    if page != TUTORIAL
    for i, code in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
]


def assumed() -> dict[str, Any]:
    """Return what a page takes for granted: a model in training."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"torch": torch, "equipoise": equipoise, "__name__": "documents"}
    given = {"batches": [], "loss": torch.tensor(1.0)}
    return {**names, **given, "model": model, "optimizer": optimizer}


@pytest.mark.parametrize("code", BLOCKS)
def test_a_code_block_runs_unchanged(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    # The skinny MLflow has files only; the full one must be told that they are meant.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    with mock.patch.dict(FAMILIES):
        exec(compile(code, "block", "exec"), assumed())


def test_the_page_of_the_command_line_is_current() -> None:
    """``./dev docs`` writes it from the commands."""
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == (
        GENERATED["cli.md"]()
    )


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = LINK.findall(page.read_text(encoding="utf-8"))
        ahead += [(page.parent / path).resolve() for path, _ in links if path]
    assert {named(p) for p in PAGES} <= {named(p) for p in reached}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        if anchor:
            heads = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {_anchor(head) for head in heads}, f"no #{anchor}"


def _anchor(head: str) -> str:
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
