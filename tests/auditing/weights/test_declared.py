"""A directory is compared with its config.json: what is missing, extra, misshapen."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from equipoise.auditing.audit import Audit, audit
from equipoise.errors import InputError
from tests.zoo.specimens import hugging

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "vocab_size": 50}
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {**SIZES, "num_key_value_heads": 2}
    hugging("LlamaForCausalLM", **sizes)("eager").save_pretrained(folder)
    return folder


@pytest.fixture(params=["transformers", "numbers"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numbers":
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    return request.param


def changed(whole: Path, folder: Path, change: Change, **config: object) -> Audit:
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    declared = json.loads((whole / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(declared))
    return audit(folder)


def drop(tensors: dict[str, Tensor], part: str) -> None:
    for name in [n for n in tensors if part in n]:
        del tensors[name]


def codes(found: Audit) -> set[str]:
    kinds = "missing", "extra", "misshapen", "untied"
    return {f.code for f in found.findings if f.code.split(".")[-1] in kinds}


def test_a_whole_model_is_compared_and_nothing_found(
    whole: Path, tmp_path: Path, asked: str
) -> None:
    found = changed(whole, tmp_path, lambda tensors: None)
    assert codes(found) == set()
    assert any("compared with" in fact for fact in found.facts)


def test_a_layer_that_is_not_in_the_file(
    whole: Path, tmp_path: Path, asked: str
) -> None:
    """The config declares 3 layers, and the file has 2."""
    found = changed(whole, tmp_path, lambda tensors: drop(tensors, ".2."))
    assert codes(found) == {"weights.missing"}
    assert found.verdict.state != "healthy"


def test_a_layer_that_is_not_declared(whole: Path, tmp_path: Path, asked: str) -> None:
    found = changed(whole, tmp_path, lambda tensors: None, num_hidden_layers=2)
    assert codes(found) == {"weights.extra"}
    assert found.verdict.state != "healthy"


def test_one_tensor_that_is_missing_and_one_of_another_shape(
    whole: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        drop(tensors, "layers.1.mlp.down_proj")
        tensors["model.norm.weight"] = torch.ones(31)

    found = changed(whole, tmp_path, change)
    assert codes(found) == {"weights.missing", "weights.misshapen"}
    messages = " ".join(f.message for f in found.findings)
    assert "stored as 31" in messages and "has 32" in messages


def test_an_output_matrix_is_missing_unless_it_is_tied(
    whole: Path, tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": True}
    lost = changed(whole, tmp_path, lambda t: drop(t, "lm_head"))
    assert codes(lost) == {"weights.missing"}
    assert (
        codes(changed(whole, tmp_path, lambda t: drop(t, "lm_head"), **tied)) == set()
    )
    both = changed(whole, tmp_path, lambda t: t["lm_head.weight"].add_(1.0), **tied)
    assert "weights.untied" in codes(both)


def test_a_model_that_nobody_knows_is_counted(whole: Path, tmp_path: Path) -> None:
    own = {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    found = changed(whole, tmp_path, lambda t: drop(t, "layers.1."), **own)
    assert codes(found) == {"weights.missing"}
    assert any("has no class 'MineForCausalLM'" in fact for fact in found.facts)


@pytest.mark.parametrize("count", [10**9, 5000])
def test_a_hostile_count_makes_no_model(
    whole: Path, tmp_path: Path, count: int
) -> None:
    changed(whole, tmp_path, lambda tensors: None, num_hidden_layers=count)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    spec = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"w":{spec},"w":{spec}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(InputError, match="'w' stands in it twice"):
        audit(path)
