"""From a typed name to a verdict: measuring, keeping, loading, showing."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import (
    NATIVE,
    Bench,
    Storage,
    relative_error,
)
from equipoise.auditing.precision.page import (
    headline,
    keep_code,
    named,
    print_study,
    remarks,
    write_study,
)
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.study import (
    kept_by_measurement,
    kept_by_prediction,
    kept_within,
    lost_epsilons,
    range_by_module,
    study,
)
from equipoise.auditing.precision.walk import numbers_by_module
from equipoise.auditing.subject import loaded, loaded_batch, output_of
from equipoise.cli import main
from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS
from equipoise.text.numbers import short
from tests.auditing.precision.models import Residual, tokens

BF16 = Storage.named("bf16")


def test_emulation_agrees_with_the_machine() -> None:
    model, ids = tokens()
    bench = Bench(model.float(), ids)
    for name in ("bf16", "fp16"):
        native = bench.native_mismatch(FORMATS[name])
        assert 0.5 < bench.mismatch(Storage.named(name)) / native < 2
    with pytest.raises(InputError, match="no dtype every layer runs in"):
        bench.native_mismatch(FORMATS["e4m3"])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_native_run_is_that_of_the_machine(name: str) -> None:
    """Products in float32 rounded once: the kernel's own, up to the order of sums."""
    model, ids = tokens()
    bench, dtype = Bench(model.float(), ids), NATIVE[name]
    with torch.no_grad():
        own = output_of(copy.deepcopy(model).to(dtype).eval(), ids)
    expected = relative_error(own, bench.reference)
    assert bench.native_mismatch(FORMATS[name]) == pytest.approx(expected, rel=0.1)


def test_squares_of_modules_add_up() -> None:
    model, ids = tokens()
    bench = Bench(model, ids)
    alone = bench.by_module(BF16)
    together = math.sqrt(sum(e**2 for e in alone.values()))
    assert 0.6 < bench.mismatch(BF16) / together < 1.6


def test_gradient_mismatch_shrinks_with_precision() -> None:
    model, ids = tokens()
    bench = Bench(model, ids)
    coarse = bench.gradient_mismatch(BF16)
    fine = bench.gradient_mismatch(Storage.named("fp16"))
    assert set(coarse) == {n for n, _ in model.named_parameters() if "head" not in n}
    for name, error in fine.items():
        assert 0 < error < coarse[name] < 0.2


def test_a_fused_kernel_has_no_scores_to_round() -> None:
    model, ids = tokens()
    opened, fused = (
        predicted(model, ids, storage=replace(BF16, fused=fused), probes=2)
        for fused in (False, True)
    )
    assert set(opened.variance["attend"]) - set(fused.variance["attend"]) == {"score"}
    assert fused.variance["mlp.up"] == opened.variance["mlp.up"]
    assert fused.total < opened.total


def test_a_set_within_a_budget_keeps_what_is_read_wide() -> None:
    """Only a product reads what attend.qkv makes: keeping it would change nothing."""
    model, ids = tokens()
    bench = Bench(model, ids)
    found = predicted(model, ids, storage=BF16, probes=4)
    size = numbers_by_module(model, ids)
    assert size["mlp.up"] == size["mlp"] // 1.5 == ids.numel() * 16
    everything = kept_within(bench, found, storage=BF16, numbers=1e9)
    assert {"attend.qkv", "mlp.norm"}.isdisjoint(everything.sites)
    assert {"", "embed", "mlp.down"} <= set(everything.sites)
    some = kept_within(bench, found, storage=BF16, numbers=2 * size["mlp.down"])
    assert 0 < sum(size[s] for s in some.sites) <= 2 * size["mlp.down"]
    narrow = bench.keeping(replace(BF16, narrow_products=True))
    assert everything.measured < narrow
    assert kept_within(bench, found, storage=BF16, numbers=0).sites == ()


def test_kept_sets_reach_their_target() -> None:
    model, ids = tokens()
    bench = Bench(model, ids)
    found = predicted(model, ids, storage=BF16, probes=4)
    target = 0.6 * bench.mismatch(BF16)
    ours = kept_by_prediction(bench, found, storage=BF16, target=target)
    greedy = kept_by_measurement(bench, storage=BF16, target=target)
    assert ours.reached and greedy.reached
    assert len(greedy.sites) <= len(ours.sites) <= len(greedy.sites) + 2
    nothing = kept_by_prediction(bench, found, storage=BF16, target=1.0)
    assert nothing.sites == ()
    everything = kept_by_prediction(bench, found, storage=BF16, target=1e-12)
    assert set(everything.sites) == set(found.variance)
    with pytest.raises(InputError, match="must be positive"):
        kept_by_measurement(bench, storage=BF16, target=0.0)


def test_trials_that_are_left_out_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tokens()
    found = predicted(model, ids, storage=BF16, probes=4)
    runs: list[str] = []
    monkeypatch.setattr(Bench, "mismatch", counted(Bench.mismatch, runs))
    full = Bench(model, ids).keeping(BF16)

    def kept() -> tuple[list[tuple[str, ...]], int]:
        runs.clear()
        sets = []
        for part in (0.5, 0.3, 0.15):
            bench, target = Bench(model, ids), part * full
            made = kept_by_prediction(bench, found, storage=BF16, target=target)
            sets.append(made.sites)
        return sets, len(runs)

    few, cost = kept()
    # Without a prediction and without float32, every module kept is tried.
    monkeypatch.setattr("equipoise.auditing.precision.study.SPARE", math.inf)
    monkeypatch.setattr(Bench, "settles", lambda bench, storage, target: False)
    every, most = kept()
    assert few == every and len(few[-1]) > 2
    assert 2 * cost < most


def counted(run: Callable[..., float], runs: list[str]) -> Callable[..., float]:
    def noted(*args: Any, **kwargs: Any) -> float:
        runs.append("run")
        return run(*args, **kwargs)

    return noted


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_sums_in_float32_are_near_enough_for_a_trial(name: str) -> None:
    model, ids = tokens()
    bench, storage = Bench(model, ids), Storage.named(name)
    quick = bench.nearly_keeping(storage, ["head"])
    assert quick == pytest.approx(bench.keeping(storage, ["head"]), rel=0.02)
    assert bench.nearly_keeping(storage, ["head"]) == bench.keeping(storage, ["head"])
    assert bench.settles(storage, quick) and not bench.settles(storage, 1e-9)
    assert not bench.settles(Storage.named("fp32"), quick)


def test_a_set_that_float32_settles_reaches_its_target_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums in float32 that flatter every set by a fifth lead to the same target."""
    model, ids = tokens()
    bench = Bench(model, ids)
    found = predicted(model, ids, storage=BF16, probes=4)
    measured = Bench.nearly_keeping
    monkeypatch.setattr(Bench, "nearly_keeping", lambda *a: 0.8 * measured(*a))
    target = 0.5 * bench.keeping(BF16)
    kept = kept_by_prediction(bench, found, storage=BF16, target=target)
    assert kept.reached and kept.measured == bench.keeping(BF16, kept.sites)
    assert len(kept.sites) < len(found.variance)


def test_ranges_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=1e-8))
    with torch.no_grad():
        model[0].bias.fill_(1e6)
        model[0].weight.zero_()
    use = range_by_module(model, torch.ones(2, 4), storage=Storage.named("fp16"))
    assert use["0"].overflow == 1.0
    assert lost_epsilons(model, FORMATS["fp16"]) == {"1": 0.0}
    assert lost_epsilons(model, FORMATS["bf16"]) == {}


def test_study_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ids = tokens()
    found = study(model.float(), ids, storage=BF16, every_module=True)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert [row.share for row in found.rows] == sorted(
        (row.share for row in found.rows), reverse=True
    )
    assert {row.site for row in found.rows if row.keep} == set(found.keep_list.sites)
    assert "in bf16: output error" in headline(found)
    assert f"error {short(found.native or 0)} run natively (" in headline(found)
    assert any("native kernel" in line for line in remarks(found))
    nested = [replace(found.rows[0], site=name) for name in ("blocks.0", "blocks.0.up")]
    both = replace(found, rows=tuple(nested))
    assert named(both, "blocks.0") == "own operations of blocks.0"
    assert named(both, "blocks.0.up") == "blocks.0.up"
    assert named(both, "") == "own operations of the model"
    print_study(found, rows=3)
    assert "smaller ones" in capsys.readouterr().out
    page = write_study(found, tmp_path / "deep" / "page.html").read_text()
    assert page.count("<tr") == len(found.rows) + 1
    assert "http" not in page.replace("<!doctype html>", "")


def test_the_printed_code_applies_the_advice() -> None:
    model, ids = tokens()
    model = model.float()
    found, reference = study(model, ids, storage=BF16), Bench(model, ids).reference
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda m, x, y, name=name: seen.setdefault(name, set()).add(y.dtype)
            )
    lines = keep_code(found)
    assert all(repr(site) in lines for site in found.keep_list.sites)
    exec(lines, {"model": model})
    with torch.no_grad():
        error = relative_error(output_of(model, ids), reference)
    assert error == pytest.approx(found.keep_list.measured, rel=0.25)
    for name, dtypes in seen.items():
        kept = name in found.keep_list.sites
        assert dtypes == {torch.float32 if kept else torch.bfloat16}, name


def test_a_format_without_error_has_nothing_to_keep() -> None:
    model, ids = tokens()
    with pytest.raises(InputError, match="makes no error"):
        study(model, ids, storage=Storage.named("fp64"))


def test_a_format_without_error_reaches_every_target() -> None:
    model, ids = tokens()
    found = study(model, ids, storage=Storage.named("fp64"), target=1e-3)
    assert (
        found.keep_list.sites == () and found.keep_list.reached and found.predicted == 0
    )


def test_the_dtype_of_the_model_itself_is_measured_and_predicted() -> None:
    model, ids = tokens()
    found = study(model.float(), ids, storage=Storage.named("fp32"))
    assert 1e-8 < found.measured < 1e-6
    assert 0.5 < found.measured / found.predicted < 2


def test_no_reference_no_comparison() -> None:
    model = Residual()
    with pytest.raises(InputError, match="not finite even in float64"):
        Bench(model, torch.full((1, 8), math.nan))


def test_outputs_of_every_form() -> None:
    class Gives(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.form = form

        def forward(self, x: Tensor) -> object:
            forms = {"tuple": (3, x), "dict": {"loss": x.sum(), "y": x}, "text": "y"}
            return forms[self.form]

    x = torch.ones(2)
    assert output_of(Gives("tuple"), x) is x
    assert output_of(Gives("dict"), {"x": x}) is x
    assert output_of(Gives("tuple"), (x,)) is x
    with pytest.raises(InputError, match="returned str"):
        output_of(Gives("text"), x)


MAKER = """
import torch
from tests.auditing.precision.models import Residual
def make():
    torch.manual_seed(0)
    return Residual(), torch.randn(3, 8)
def bare():
    return Residual()
def wrong():
    return 3
"""


def test_loading(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MAKER)
    model, batch, source = loaded(f"{file}:make")
    assert source is not None and source.name == f"the batch that {file}:make returned"
    assert isinstance(model, Residual) and isinstance(batch, Tensor)
    assert loaded("tests.auditing.precision.models:tokens")[0] is not None
    for spec, words in {
        "nothing": "cannot find a model",
        f"{file}:absent": "no function 'absent'",
        f"{file}:wrong": "returned int",
        f"{tmp_path}/no.py:make": "no such file",
        "no.such.package:make": "cannot import",
    }.items():
        with pytest.raises(InputError, match=words):
            loaded(spec)


def test_loading_a_hugging_face_directory(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert loaded(str(tmp_path)).batch is None  # no tokenizer: nothing is made up
    with pytest.raises(InputError, match=r"--text needs .*tokenizer.json"):
        loaded(str(tmp_path), text=tmp_path / "config.json")
    model, batch, source = loaded(str(tmp_path), random_tokens=True)
    assert isinstance(batch, dict) and batch["input_ids"].shape == (2, 32)
    assert source is not None and source.random
    assert (
        0.5
        < Bench(model, batch).mismatch(BF16)
        / predicted(model, batch, storage=BF16).total
        < 2
    )


def test_text_is_read_with_the_models_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = "a b c d e".split()
    table = {word: i for i, word in enumerate(["<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"eos_token": "<end>", "unk_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(
        tmp_path
    )
    config = GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    text = tmp_path / "mine.txt"
    text.write_text("a b c d e " * 4)
    _, batch, source = loaded(str(tmp_path), text=text, tokens=64)
    assert isinstance(batch, dict) and source is not None
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 1, 2, 3],
        [4, 5, *range(1, 6), 1],
    ]
    assert source.introduce("So.") == f"Run on the first 2 × 8 tokens of {text}. So."
    _, ours, source = loaded(str(tmp_path))
    assert isinstance(ours, dict) and "attention_mask" in ours
    assert source is not None and "two English sentences of ours" in source.name
    text.write_text("a")
    with pytest.raises(InputError, match="holds 1 tokens: at least 2"):
        loaded(str(tmp_path), text=text)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        loaded(str(tmp_path), text=text)
    with pytest.raises(InputError, match="brings none"):
        loaded("tests.auditing.precision.models:tokens", text=text)


def test_a_model_without_a_tokenizer_needs_a_batch(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    ViTModel(config).save_pretrained(tmp_path)
    assert loaded(str(tmp_path)).batch is None
    with pytest.raises(InputError, match="reads no tokens"):
        loaded(str(tmp_path), random_tokens=True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config.json"):
        loaded(str(tmp_path))


def test_loading_batches(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x = torch.ones(2, 3)
    torch.save({"x": x}, tmp_path / "a.pt")
    save_file({"x": x}, tmp_path / "a.safetensors")
    (tmp_path / "a.json").write_text('{"x": [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]}')
    for name in ("a.pt", "a.safetensors", "a.json"):
        batch = loaded_batch(tmp_path / name)
        assert isinstance(batch, dict) and torch.equal(batch["x"], x)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match="a batch is"):
        loaded_batch(tmp_path / "a.txt")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="mapping of names to numbers"):
        loaded_batch(tmp_path / "list.json")
    with pytest.raises(InputError, match="no such batch"):
        loaded_batch(tmp_path / "b.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for name, torn in {
        "empty.pt": b"",
        "half.pt": whole[: len(whole) // 2],
        "text.pt": b"text",
        "text.safetensors": b"some text",
    }.items():
        (tmp_path / name).write_bytes(torn)
        with pytest.raises(InputError, match="not a whole file of tensors"):
            loaded_batch(tmp_path / name)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MAKER)
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as left:
        main(["precision", f"{file}:make", "--format", "e4m3", "--html", str(page)])
    assert left.value.code in (0, None)
    first = f"Run on the batch that {file}:make returned. Residual in e4m3, tensors"
    assert capsys.readouterr().out.startswith(first)
    assert first in page.read_text()
    with pytest.raises(SystemExit) as left:
        main(["precision", f"{file}:bare"])
    assert left.value.code == InputError.exit_code
