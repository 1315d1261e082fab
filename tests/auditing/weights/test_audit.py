"""Audits of weights: numbers against SVD, planted faults named, clean models clean."""

import copy
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.audit_faults import FAMILIES, FAULTS, half_loaded, is_named, swapped
from equipoise.auditing.audit import audit
from equipoise.auditing.offline_page import MEANINGS, PAGES, write_audit
from equipoise.auditing.page import (
    change_rows,
    common_name,
    data_rows,
    layer_rows,
)
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.layout import attentions, block_of
from equipoise.auditing.weights.measures import statistics
from equipoise.cli import application
from equipoise.judging.judge import Judge
from equipoise.records import Reading
from equipoise.text.numbers import short
from tests.models import GPT, GPTConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_those_of_svd(family: str) -> None:
    model = FAMILIES[family]()
    found = audit(model)
    for attention in attentions(in_memory(model, name="model")):
        maps = {
            letter: getattr(attention, letter)
            .of(model.state_dict()[getattr(attention, letter).tensor])
            .double()
            for letter in "qkvo"
        }
        exact = {letter: torch.linalg.matrix_norm(w, 2) for letter, w in maps.items()}
        for letter, norm in exact.items():
            (value,) = found.reading(f"projection.norm.{letter}")[attention.site]
            assert value == pytest.approx(float(norm), rel=1e-4)
        product = torch.stack(list(exact.values())).prod()
        (gain,) = found.reading("projection.G")[attention.site]
        assert gain == pytest.approx(float(product), rel=4e-4)
        H, G = attention.heads, attention.kv_heads
        assert H is not None and G is not None
        pairs = {"qk": (maps["q"], maps["k"]), "vo": (maps["v"], maps["o"].mT)}
        for name, (a, b) in pairs.items():
            a_H, b_H = (
                a.unflatten(0, (H if name == "qk" else G, -1)),
                b.unflatten(0, (G if name == "qk" else H, -1)),
            )
            a_H, b_H = (x.repeat_interleave(H // len(x), 0) for x in (a_H, b_H))
            norms = torch.linalg.matrix_norm(a_H.mT @ b_H, 2).tolist()
            values = found.reading(f"projection.{name}")[attention.site]
            assert values == pytest.approx(norms, rel=1e-6)


def test_the_output_projection_is_no_part_of_the_feedforward_bound() -> None:
    """BERT calls both output.dense."""
    model = FAMILIES["BERT"]()
    weights = {n: w for n, w in model.state_dict().items() if "layer.0." in n}
    names = ("intermediate.dense.weight", "layer.0.output.dense.weight")
    maps = [w for name, w in weights.items() if name.endswith(names)]
    norms = [float(torch.linalg.matrix_norm(w.double(), 2)) for w in maps]
    found = audit(model).reading("weights.bound.feedforward")
    (bound,) = next(value for site, value in found.items() if site.endswith("layer.0"))
    assert len(norms) == 2
    assert 10**bound == pytest.approx(1.128904 * norms[0] * norms[1], rel=3e-4)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["GPT-2", "Llama", "GPT-NeoX"])
def test_names_planted_faults(family: str, fault: str) -> None:
    planted = FAULTS[fault](FAMILIES[family](), random.Random(f"{family} {fault} 1"))
    found = audit(planted.model)
    assert is_named(planted, found), found.verdict.sentence
    assert found.verdict.state in {"at risk", "dead"}


@pytest.mark.parametrize("family", FAMILIES)
def test_warns_of_no_clean_model(family: str) -> None:
    found = audit(FAMILIES[family]())
    assert found.verdict.state == "healthy"
    assert [f for f in found.findings if f.severity != "info"] == []


class Trained(GPT):
    """A model whose weights look trained: a few directions far above the rest."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(width=64, depth=4, heads=4, context=16))
        rng = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    rows, columns = parameter.shape
                    a = torch.randn(rows, 2, generator=rng)
                    b = torch.randn(2, columns, generator=rng)
                    parameter.add_(0.2 * a @ b * parameter.std())
                    parameter.mul_(torch.rand(rows, 1, generator=rng) + 0.5)
                else:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))


def test_names_layers_that_were_not_loaded() -> None:
    assert audit(Trained()).verdict.state == "healthy"
    planted = half_loaded(Trained(), random.Random(0))
    assert is_named(planted, audit(planted.model))


def test_names_swapped_layers_and_what_moved() -> None:
    planted = swapped(Trained(), random.Random(0))
    found = audit(planted.model, against=planted.against)
    assert is_named(planted, found)
    assert found.comparison is not None
    farthest = found.comparison.moved[0]
    assert block_of(farthest.name) in planted.also
    assert json.loads(found.to_json())["changes"][0]["name"] == farthest.name


def test_a_few_steps_of_training_swap_nothing() -> None:
    before = Trained()
    after = copy.deepcopy(before)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(1.01)
    found = audit(after, against=before)
    assert found.verdict.state == "healthy"
    assert found.comparison is not None
    assert {round(c.relative, 4) for c in found.comparison.changes} == {0.01}


def test_what_moved_is_said_in_the_facts() -> None:
    """Two checkpoints: one tensor moved, one is new, one was zero and is not."""
    old = {"a": torch.ones(4, 4), "b": torch.zeros(3), "c": torch.ones(2)}
    new = {"a": torch.ones(4, 4), "b": torch.zeros(3), "c": torch.tensor([1.0, 2.0])}
    found = audit({**new, "d": torch.ones(1)}, against=old)
    moved, added = found.facts[1:]
    assert moved.startswith("against state dict: 1 of 3 tensors moved, c the farthest")
    assert "by 0.707 of its norm, cosine 0.949" in moved
    assert added == "tensors that are new: 1, such as d"
    (still,) = audit(new, against=new).facts[1:]
    assert still == "against state dict: 0 of 3 tensors moved"
    from_zero = audit({**new, "b": torch.ones(3)}, against=old)
    assert from_zero.facts[-1] == "tensors that were all zeros before: 1"
    assert [row[0] for row in change_rows(from_zero)] == ["c", "b"]
    assert change_rows(from_zero)[1][1:] == ["was all zeros", "–"]
    given = json.loads(from_zero.to_json(), parse_constant=pytest.fail)
    assert given["changes"][1]["relative"] == "inf"  # not Infinity: no JSON


def test_subnormal_weights_are_found() -> None:
    found = audit({"w": torch.full((40, 40), 1e-6, dtype=torch.float16)})
    assert [(f.code, f.site) for f in found.findings] == [("weights.subnormal", "w")]
    assert found.verdict.state == "at risk"


def test_initial_weights_are_compared_with_the_plan() -> None:
    model = GPT(GPTConfig(width=64, depth=4, heads=4, context=16, init_std=1.0))
    found = audit(model)
    assert [f.code for f in found.findings] == ["weights.initial_scale"]


def test_packed_weights_are_not_called_healthy() -> None:
    packed = {"a.qweight": torch.zeros(4, 4, dtype=torch.uint8)}
    assert audit(packed).verdict.state == "not judged"


def test_findings_are_counted_beyond_a_number() -> None:
    sites = tuple(f"w{i}" for i in range(100))
    ones = tuple((1.0,) for _ in sites)
    reading = Reading(step=0, quantity="weights.nonfinite", sites=sites, values=ones)
    judge = Judge(of="weights")
    found = judge.add_at_once([reading])
    assert len(found) == len(judge.verdict.findings) == 41
    assert found[-1].params == {"of": "weights.nonfinite", "count": 60}


def test_on_a_batch_rules_of_runs_judge_too() -> None:
    """Attention that saturates is found by the rule that a run is judged by."""
    model = Trained()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight.mul_(30.0)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = audit(model, (ids[:, :-1], ids[:, 1:]))
    assert "attention.saturated" in [f.code for f in found.findings]
    assert found.reading("loss") and found.reading("gradient.norm")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_is_audited_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the audit nor what it watches with opens a database, and nothing else."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a run file was opened")

    monkeypatch.setattr("sqlite3.connect", refuse)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    found = audit(Trained(), (ids[:, :-1], ids[:, 1:]))
    assert found.reading("loss") and found.reading("attention.theta.p5")


def test_without_targets_no_gradient_is_read() -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2).eval()
    found = audit(layer, torch.randn(5, 2, 32))
    assert any("no loss" in fact for fact in found.facts)
    assert found.reading("gradient.norm") == {}


def test_a_page_shows_what_was_read_and_every_number_links(tmp_path: Path) -> None:
    model = GPT(GPTConfig(width=16, depth=3, heads=2, context=8)).eval()
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    found = audit(model, (ids[:, :-1], ids[:, 1:]))
    rows = {row[0]: row for row in data_rows(found)}
    entropy = found.reading("attention.entropy")
    value, site, head = min(
        (v, site, h) for site, own in entropy.items() for h, v in enumerate(own)
    )
    name, lowest, where, *_ = rows["attention.entropy"]
    assert (lowest, where) == (short(value), f"{site}, head {head}")
    assert {"loss", "gradient.norm", "residual.B"} <= rows.keys()
    assert "projection.G" not in rows  # stands in the table of layers
    page = write_audit(found, tmp_path / "a.html").read_text()
    links, targets = (
        set(re.findall(pattern, page)) for pattern in ('href="#(.+?)"', 'id="(.+?)"')
    )
    assert "theta" in links and links <= targets
    assert 'href="docs' not in page
    assert data_rows(audit(model)) == []


def test_the_pages_that_numbers_name_are_there() -> None:
    docs = Path(__file__).parents[3] / "docs"
    names = {page for page, _ in MEANINGS.values()} | set(PAGES.values())
    missing = [
        name
        for name in names
        if not (docs / f"{name}.md").exists()
        and not (docs / "quantities" / f"{name}.md").exists()
    ]
    assert not missing


def test_a_narrow_screen_shows_the_part_of_a_name_that_differs() -> None:
    model = GPT(GPTConfig(width=16, depth=3, heads=2, context=8))
    lines = layer_rows(audit(model))
    every, names = common_name([line[0] for line in lines])
    assert (every, names) == ("… of blocks.….attention", ["0", "1", "2"])
    assert common_name(["a.b"]) == (None, ["a.b"])
    assert common_name(["a.b", "a.b.c"]) == ("… of a.…", ["b", "b.c"])


def test_one_point_needs_no_second() -> None:
    theta = Reading(
        step=0, quantity="attention.theta.p5", sites=("a",), values=((0.01, 0.02),)
    )
    assert [f.code for f in Judge().add_at_once([theta])] == ["attention.saturated"]


def test_command_writes_and_fails_as_asked(tmp_path: Path) -> None:
    planted = FAULTS["NaN tensor"](FAMILIES["BERT"](), random.Random(0))
    torch.save(planted.model.state_dict(), tmp_path / "m.pt")
    page, data = tmp_path / "a.html", tmp_path / "a.json"
    words = ["audit", str(tmp_path / "m.pt"), "--fail-on", "error"]
    words += ["--html", str(page), "--json", str(data)]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 1
    assert result.stdout.startswith("Dead: ")
    assert planted.place in result.output
    assert planted.place in page.read_text()
    assert json.loads(data.read_text())["verdict"]["state"] == "dead"
    clean = ["audit", str(tmp_path / "m.pt"), "--fail-on", "often"]
    assert CliRunner().invoke(application(clean), clean).exit_code != 0
    weights = (tmp_path / "m.pt").read_bytes()
    slip = [*words[:2], "--json", words[1]]
    assert CliRunner().invoke(application(slip), slip).exit_code == 2
    slip[-2:] = [f"--json={words[1]}"]
    refused = CliRunner().invoke(application(slip), slip)
    assert "is not JSON: it was not overwritten" in str(refused.exception)
    assert (tmp_path / "m.pt").read_bytes() == weights
    alone = [*words[:2], "--json"]
    printed = CliRunner().invoke(application(alone), alone)
    assert json.loads(printed.stdout)["verdict"]["state"] == "dead"
    lost = [*words[:2], "--json", str(tmp_path / "no" / "a.json")]
    assert "is there" in str(CliRunner().invoke(application(lost), lost).exception)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_sizes_are_right_at_every_scale(dtype: torch.dtype, scale: float) -> None:
    """Rows of 4096 are summed in float32, unless their squares leave its range."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(2, 8192, generator=generator) * scale).to(dtype)
    numbers[0, :3] = 0.0
    numbers[0, 3] = 1e-40  # below the smallest normal number of both
    found = statistics(numbers, smallest=float(torch.finfo(dtype).smallest_normal))
    exact = numbers.double()
    assert found.rms == pytest.approx(float(exact.square().mean().sqrt()), rel=2e-6)
    assert found.largest == float(exact.abs().max())
    assert found.zeros * numbers.numel() == 3
    assert found.subnormal * numbers.numel() == 1


def test_noise_marks_the_verdict(tmp_path: Path) -> None:
    """The first line says what an audit was run on, and that noise is no text."""
    (tmp_path / "mine.py").write_text(
        "from tests.models import GPT, GPTConfig\n"
        "def gpt():\n    return GPT(GPTConfig(width=16, depth=2, heads=2, context=8))\n"
    )
    words = ["audit", f"{tmp_path}/mine.py:gpt"]
    page = ["--html", str(tmp_path / "page.html")]
    noise = CliRunner().invoke(application(words), [*words, "--random-tokens", *page])
    marked = "Run on 2 × 8 random tokens, NOT on text, so this is no verdict"
    assert noise.output.startswith(marked), noise.output
    assert marked in (tmp_path / "page.html").read_text()
    alone = CliRunner().invoke(application(words), words)
    assert alone.output.startswith("Healthy: ")


LOADED_BY_AN_AUDIT = """
import sys
from equipoise.cli import main
try:
    main(["audit", sys.argv[1]])
except SystemExit as end:
    assert not end.code
print(*(name for name in sys.modules if name.startswith("equipoise.")), sep=",")
"""


def test_an_audit_of_weights_loads_nothing_that_watches(tmp_path: Path) -> None:
    torch.save(nn.TransformerEncoderLayer(32, 4, 64).state_dict(), tmp_path / "m.pt")
    words = [sys.executable, "-c", LOADED_BY_AN_AUDIT, str(tmp_path / "m.pt")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split(",")
    rooms = {name.split(".")[1] for name in loaded}
    assert not rooms & {"watching", "probes", "store", "report", "sinks", "autopilot"}
    assert len(loaded) <= 61
