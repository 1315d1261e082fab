"""Watching changes nothing: every bit of a training is the same with and without us."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equipoise
from tests.watching.models import TinyModel, hooks_on, identical, trained
from tests.zoo.specimens import SPECIMENS

# These tiny models learn fast: the rule is right, and no gap of ours.
LARGE = "update.too_large"
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {"make": TinyModel},
    "dropout": {"make": partial(TinyModel, dropout=0.2)},
    "bf16": {"make": partial(TinyModel, dropout=0.1), "autocast": True},
    "accumulation": {"make": partial(TinyModel, dropout=0.1), "micro": 3},
    "unclipped": {"make": TinyModel, "clip": False},
    "reentrant": {"make": partial(TinyModel, dropout=0.1, reentrant=True)},
    "checkpointed": {"make": partial(TinyModel, dropout=0.1, reentrant=False)},
}

# Near fp16's end the scaler has to find its factor first, and leaves steps out; bf16
# reaches as far as float32, so there it only grows.
SCALED: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16, "scale": 2.0**22, "changes": {0.5, 1.0, 2.0}},
    "bf16": {"dtype": torch.bfloat16, "scale": 2.0**10, "changes": {1.0, 2.0}},
}


@pytest.mark.parametrize("case", SCALED.values(), ids=SCALED)
def test_steps_that_a_scaler_leaves_out_are_identical(
    case: dict[str, Any], tmp_path: Path
) -> None:
    case = {"make": partial(TinyModel, dropout=0.1), "autocast": True, **case}
    expected = case.pop("changes")
    alone, _ = trained(**case)
    watched, handle = trained(**case, run=tmp_path / "a.eqp")
    assert identical(alone, watched)
    scales = zip(alone.scales, alone.scales[1:], strict=False)
    assert {after / before for before, after in scales} == expected
    assert handle is not None
    assert {f.severity for f in handle.findings if f.code != LARGE} <= {"info"}
    run = equipoise.open_run(handle.path)
    assert list(run.series("loss")[""][0]) == list(range(20))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("preset", ["default", "deep"])
def test_twenty_steps_are_identical(
    case: dict[str, Any], preset: str, tmp_path: Path
) -> None:
    alone, _ = trained(**case)
    watched, handle = trained(**case, run=tmp_path / "a.eqp", preset=preset)
    assert identical(alone, watched)
    assert handle is not None
    assert not [f for f in handle.findings if f.code != LARGE]
    run = equipoise.open_run(handle.path)
    assert list(run.steps) == list(range(20))
    assert list(run.series("attention.theta.p50")["blocks.0.attention"][0]) == [
        *range(0, 20, 3)
    ]


FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertModel",
    "t5": "T5ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
}


def hf(kind: str, implementation: str) -> nn.Module:
    specimen = next(s for s in SPECIMENS if s.name == FAMILIES[kind])
    return Logits(specimen.build(implementation).train())


class Logits(nn.Module):
    """A Hugging Face model that returns logits, as the tiny models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": tokens}
        if getattr(self.inner.config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = tokens
        out: Any = self.inner(**given)
        logits: torch.Tensor = getattr(out, "logits", out[0])
        return logits


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_face_models_are_identical(
    kind: str, implementation: str, tmp_path: Path
) -> None:
    make: Callable[[], nn.Module] = partial(hf, kind, implementation)
    alone, _ = trained(make)
    watched, handle = trained(make, run=tmp_path / "a.eqp")
    assert identical(alone, watched)
    assert handle is not None
    readings = equipoise.open_run(handle.path).series("attention.max_logit")
    assert len(readings) == (6 if kind == "t5" else 2)


def test_nothing_is_added_to_the_state(tmp_path: Path) -> None:
    model = TinyModel()
    keys, attributes = set(model.state_dict()), set(model.__getstate__())
    with equipoise.watch(model, run=tmp_path / "a.eqp"):
        assert set(model.state_dict()) == keys
        assert set(model.__getstate__()) == attributes
    assert hooks_on(model) == 0


def test_no_hook_and_no_mode_off_sample(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    class Nosy(TinyModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            modes = torch._C._len_torch_function_stack()
            seen.append((len(seen), hooks_on(self), modes))
            return super().forward(tokens)

    trained(Nosy, run=tmp_path / "a.eqp", every=5)
    measured = [s for s in seen if s[2]]
    assert len(measured) == 4, "one measured pass per sampled step, and nothing else"
    assert all(hooks > 8 and modes == 1 for _, hooks, modes in measured)
    # Step 10 is due when the evaluation after step 9 runs: its call is not measured.
    waiting = [hooks for _, hooks, modes in seen if hooks and not modes]
    assert waiting == [len([*TinyModel().modules()])]
