"""What the command says: parts that add up, a verdict, a page that opens offline."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from typer.testing import CliRunner

from equipoise.auditing.curvature import hessian
from equipoise.auditing.curvature.page import (
    OWN,
    bars,
    cells,
    columns,
    headline,
    remarks,
    total,
    write_study,
)
from equipoise.auditing.curvature.study import CurvatureStudy, study
from equipoise.cli import application
from equipoise.text.numbers import short
from tests.auditing.curvature import subjects

BATCH = subjects.pair(3)


@pytest.fixture(scope="module")
def found() -> CurvatureStudy:
    model = subjects.gpt(depth=1)
    sgd = SGD(model.parameters(), lr=0.1)
    return study(model, BATCH, optimizer=sgd, steps=8, every_block=True)


def test_parts_add_up_to_what_they_are_parts_of(found: CurvatureStudy) -> None:
    values = np.linalg.eigvalsh(hessian(subjects.gpt(depth=1), BATCH).dense())
    assert found.top[0].value == pytest.approx(values[-1], rel=1e-2)
    assert found.bottom.value == pytest.approx(values[0], rel=1e-2)
    assert sum(row.top for row in found.rows) == pytest.approx(
        found.top[0].value, rel=1e-3
    )
    assert sum(row.update for row in found.rows) == pytest.approx(found.totals[2])
    assert sum(v[1] for v in found.kinds.values()) == pytest.approx(found.totals[1])
    assert found.residual < 1e-9 and found.parameters == len(values)


def test_blocks_are_the_sublayers_own(found: CurvatureStudy) -> None:
    block = hessian(subjects.gpt(depth=1), BATCH).block("blocks.0.attention.*")
    truth = float(torch.linalg.eigvalsh(block.dense())[-1])
    (row,) = (row for row in found.rows if row.site == "blocks.0.attention")
    assert row.sharpness == pytest.approx(truth, rel=1e-2)


def test_the_verdict_compares_with_the_step_size(found: CurvatureStudy) -> None:
    assert found.edge is not None and found.edge.threshold == pytest.approx(20)
    said = "beyond" if found.edge.ratio > 1 else "within"
    assert f"is {said} what sgd allows, 20" in headline(found)
    # One number for one thing: λ₁ is not estimated a second time.
    assert found.edge.value is found.top[0]
    assert headline(found).count(f"sharpness λ₁ {short(found.top[0].value)}") == 2
    model = subjects.gpt(depth=1)
    bare = study(model, BATCH, count=1, probes=2, steps=4)
    assert "stable here up to lr" in headline(bare)
    # What was not measured has no column.
    lines = [cells(bare, row) for row in bare.rows] + [total(bare)]
    assert OWN not in columns(bare) and {len(line) for line in lines} == {4}


def test_along_adams_step(found: CurvatureStudy) -> None:
    model = subjects.gpt(depth=1)
    adam = AdamW(model.parameters(), lr=1e-3)
    subjects.cross_entropy(model, BATCH).backward()
    adam.step()
    other = study(model, BATCH, optimizer=adam, count=1, probes=2, steps=4)
    assert other.edge is not None and other.edge.kind == "adam"
    assert "preconditioned sharpness" in headline(other)
    groups = [{"params": p, "lr": 0.1 + 0.1 * i} for i, p in enumerate(two(model))]
    split = study(model, BATCH, optimizer=SGD(groups), count=1, probes=2, steps=4)
    assert split.edge is not None and split.edge.value is not split.top[0]
    assert "scaled by each group's learning rate" in headline(split)


def two(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    every = list(model.parameters())
    return every[:3], every[3:]


def test_the_page_is_whole_and_offline(found: CurvatureStudy, tmp_path: Path) -> None:
    page = write_study(found, tmp_path / "deep" / "page.html").read_text()
    assert all(name in page for name in columns(found)) and OWN in page
    assert "<polyline points=" in page and page.count('class="track"') == 3 * len(
        found.rows
    )
    assert "http" not in page and "<script" not in page
    assert any("kinds of operation" in line for line in remarks(found))
    assert "eigenvalue λ" in page and page.count('text-anchor="middle"') > 3
    assert "-0 %" not in page and "−0" not in page


def test_each_quantity_has_one_value(found: CurvatureStudy) -> None:
    """Totals stand in the first lines, with errors; the table holds shares."""
    assert total(found)[1:4] == ["100 %"] * 3
    lines = [cells(found, row) for row in found.rows]
    assert all(cell.endswith(" %") for line in lines for cell in line[1:4])
    said = headline(found)
    for estimate in (found.top[0], found.bottom, found.trace):
        assert f"{short(estimate.value)} ± {short(estimate.residual)}" in said
    parts = [
        sum(float(line[k].removesuffix(" %")) for line in lines) for k in (1, 2, 3)
    ]
    assert parts == pytest.approx([100] * 3, abs=len(lines) / 2)  # each is rounded


def test_bars_are_the_shares_that_are_printed(found: CurvatureStudy) -> None:
    """A total may be negative: then shares and parts have opposite signs."""
    a, b, c = found.totals
    turned = replace(found, totals=(-a, b, c))
    for row in found.rows:
        shares = [float(cell.removesuffix(" %")) for cell in cells(turned, row)[1:4]]
        for share, (left, width) in zip(shares, bars(turned, row), strict=True):
            assert share == 0 or (left < 50) == (share < 0)
            assert left == 50 or left + width == pytest.approx(50)
    near = replace(found, totals=(a, b, 0.001 * c))
    assert any("the parts along the step cancel" in line for line in remarks(near))


MODEL = """
import torch
from tests.models import GPT, GPTConfig, ViT, ViTConfig
def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(width=8, depth=1, heads=1, context=32))
def vit():
    return ViT(ViTConfig(image=4, patch=2, channels=1, width=4, depth=1, heads=1))
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(list(words)), list(words))
    return result.exit_code, result.output + str(result.exception or "")


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    gpt, page = f"{tmp_path}/mine.py:gpt", str(tmp_path / "page.html")
    quick = ["--eigenvalues", "1", "--probes", "2"]
    code, said = run("curvature", gpt)
    assert code != 0 and "give one with --batch" in said
    noise = ["--random-tokens", "--lr", "0.1", "--html", page]
    code, said = run("curvature", gpt, *noise, *quick)
    assert code == 0, said
    marked = "Run on 2 × 32 random tokens, NOT on text"
    assert said.startswith(marked) and marked in Path(page).read_text()
    assert "sharpness" in said and "blocks.0.attention" in said and "wrote" in said
    assert Path(page).is_file()
    code, said = run("curvature", f"{tmp_path}/mine.py:vit")
    assert code != 0 and "give one with --batch" in said
    batch = {"image": torch.randn(2, 1, 4, 4), "labels": torch.tensor([1, 2])}
    torch.save(batch, tmp_path / "batch.pt")
    code, said = run(
        "curvature",
        f"{tmp_path}/mine.py:vit",
        "--batch",
        f"{tmp_path}/batch.pt",
        *quick,
    )
    assert code == 0 and "ViT" in said


def test_an_optimiser_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.gpt()
    adam = AdamW(model.parameters(), lr=1e-3)
    model(subjects.tokens(2, 8)).square().sum().backward()
    adam.step()
    torch.save(adam.state_dict(), tmp_path / "adam.pt")
    quick = ["--random-tokens", "--eigenvalues", "1", "--probes", "2", "--optimizer"]
    gpt = f"{tmp_path}/mine.py:gpt"
    code, said = run("curvature", gpt, *quick, f"{tmp_path}/adam.pt")
    assert code == 0 and "preconditioned sharpness" in said, said
    code, said = run("curvature", gpt, *quick, f"{tmp_path}/none.pt")
    assert "no such file" in said
    torch.save({"state": {}, "param_groups": []}, tmp_path / "bad.pt")
    code, said = run("curvature", gpt, *quick, f"{tmp_path}/bad.pt")
    assert code != 0 and "edge_of_stability" in said
