"""Bounds of an audit: attacked, mutated, and refused where nothing bounds."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import bounds_attack
from equipoise.auditing.audit import audit
from equipoise.auditing.weights import bounds
from equipoise.auditing.weights.blocks import BLOCKS
from equipoise.auditing.weights.entries import in_memory
from equipoise.auditing.weights.measures import measure
from equipoise.text.templates import templates
from tests.zoo.specimens import Specimen

SAMPLE = (
    *("GPT2LMHeadModel", "GemmaForCausalLM", "BertModel", "GPTNeoXForCausalLM"),
    *("NemotronForCausalLM", "Phi3ForCausalLM", "GPTNeoForCausalLM"),
)
REFUSED = {
    "Qwen3ForCausalLM": "qk_norm",
    "Olmo2ForCausalLM": "not_normed",
    "MixtralForCausalLM": "experts",
    "ApertusModel": "activation",
    "ElectraModel": "norm",
    "GPT2Model with cross-attention": "undescribed",
    "GptOssForCausalLM": "scaled_rope",
    "BitNetForCausalLM": "inner_norm",
    "nanoGPT": "unknown_type",
}


def specimen(name: str) -> Specimen:
    from tests.zoo.further import EVERYTHING

    return next(s for s in EVERYTHING if s.name == name)


def attacked(name: str, *kinds: str) -> list[dict[str, Any]]:
    found = bounds_attack.rows_of(specimen(name), kinds, 4)
    return [row for row in found if "bound" in row]


@pytest.mark.parametrize("name", SAMPLE)
def test_no_bound_is_violated(name: str) -> None:
    """A fixed sample of ``./dev bench bounds_attack``."""
    found = attacked(name, *bounds_attack.WEIGHTS)
    assert {r["part"] for r in found} == {"attention", "feedforward"}
    assert all(r["attained"] > 0 for r in found)
    assert [r for r in found if r["violated"]] == []


def no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "gain_offset", lambda *given: 0.0)


def no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_bias_norm", lambda *given: 0.0)
    monkeypatch.setattr(
        bounds, "_head_biases", lambda checkpoint, site, letter: [0.0] * site.heads
    )


def half_the_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    own = bounds.radius
    monkeypatch.setattr(bounds, "radius", lambda *a, **k: own(*a, **k) / 2)


def usual_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = BLOCKS["llama"].scale
    monkeypatch.setitem(BLOCKS, "t5", replace(BLOCKS["t5"], scale=usual))


def slope_of_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "activation_named", lambda kind: (None, 1.0))


@pytest.mark.parametrize(
    ("name", "kind", "mutated"),
    [
        ("GemmaForCausalLM", "aligned", no_offset),
        ("NemotronForCausalLM", "aligned, half", no_offset),
        ("GemmaForCausalLM", "aligned", half_the_radius),
        ("T5ForConditionalGeneration", "aligned, half", usual_scale),
        ("BertModel", "aligned", slope_of_relu),
    ],
)
def test_the_attack_finds_a_bound_that_is_none(
    name: str,
    kind: str,
    mutated: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutated(monkeypatch)
    assert any(row["violated"] for row in attacked(name, kind))


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_has_no_bound_says_why(name: str, reason: str) -> None:
    one = specimen(name)
    model = one.build(one.implementations[-1])
    found = measure(in_memory(model, name=name))
    parts = {part for part, why in found.unbounded if why == reason}
    assert parts
    for part in parts:
        printed = found.values.get(f"weights.bound.{part}", {})
        assert not set(printed) & set(found.unbounded[part, reason])
    lines = audit(model).facts
    assert any(templates()[f"bound.{reason}"].message in line for line in lines)


def test_every_reason_has_words() -> None:
    """Reasons are literals in two files; each has a template, and none is idle."""
    home = Path(bounds.__file__).parent
    written = (home / "bounds.py").read_text() + (home / "blocks.py").read_text()
    words = {c.removeprefix("bound.") for c in templates() if c.startswith("bound.")}
    assert {word for word in words if f'"{word}"' in written} == words
    used = {b.without or b.attention_without for b in BLOCKS.values()} - {""}
    used |= {reason for b in BLOCKS.values() for _, reason in b.refused}
    assert used <= words


def test_a_folder_has_the_bounds_of_its_model(tmp_path: Path) -> None:
    """γ − 1 is stored: in memory the norm is run, in a folder the type says so."""
    one = specimen("GemmaForCausalLM")
    model: Any = one.build("eager")
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(model.config.to_dict(), default=str)
    )
    stored, live = audit(tmp_path), audit(model)
    for part in ("attention", "feedforward"):
        expected = live.reading(f"weights.bound.{part}")
        assert len(expected) == 2
        for site, (found,) in stored.reading(f"weights.bound.{part}").items():
            assert found == pytest.approx(expected.pop(site)[0])
        assert not expected
    gains = stored.reading("weights.gain")
    assert {gain for gain, *_ in gains.values()} == {1.0}


def test_heads_of_a_fused_map_have_their_own_width() -> None:
    """GPT-NeoX by dense SVD of the parts its own forward splits."""
    one = specimen("GPTNeoXForCausalLM")
    model: Any = one.build("eager").double()
    layer = model.gpt_neox.layers[0]
    attention, H, d = layer.attention, 4, 8
    by_head = attention.query_key_value.weight.detach().view(H, 3, d, 32)
    out = attention.dense.weight.detach().view(32, H, d)
    B = math.sqrt(32.0)

    def two(matrix: Tensor) -> float:
        return float(torch.linalg.matrix_norm(matrix, 2))

    expected = sum(
        two(out[:, h] @ by_head[h, 2])
        * (1 + 2 * B**2 / math.sqrt(d) * two(by_head[h, 0]) * two(by_head[h, 1]))
        for h in range(H)
    )
    name = "gpt_neox.layers.0.attention"
    (found,) = audit(model).reading("weights.bound.attention")[name]
    assert 10**found == pytest.approx(expected, rel=2e-5)


class OddNorm(nn.Module):
    """A norm whose γ is the square of what it stores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (6,)) * self.weight.square()


class ShiftedNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return nn.functional.rms_norm(x, (7,), self.weight + 1)


def test_a_norm_is_run_to_learn_what_its_gain_is() -> None:
    model = nn.ModuleDict(
        {"odd": OddNorm(), "shifted": ShiftedNorm(7), "plain": nn.LayerNorm(5)}
    )
    before = torch.random.get_rng_state()
    offsets = in_memory(model, name="norms").offsets
    assert torch.equal(before, torch.random.get_rng_state())
    assert math.isnan(offsets["odd"])
    assert offsets["shifted"] == 1.0
    assert offsets["plain"] == 0.0
