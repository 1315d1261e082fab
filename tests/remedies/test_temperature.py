"""Temperature softens every head, and is undone bit for bit."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from equipoise.errors import InputError
from equipoise.remedies.base import Remedy
from equipoise.remedies.temperature import (
    Temperature,
    TemperatureWarmup,
    temperature_settings,
)
from tests.models import GPT, GPTConfig

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "lab": GPT(GPTConfig(width=16, depth=2, heads=2, temperature=1.5)),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=256)
        ).eval(),
        "llama": LlamaForCausalLM(
            LlamaConfig(**SIZES, num_attention_heads=2, vocab_size=256)
        ).eval(),
    }


def logits(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


@pytest.mark.parametrize("name", ["lab", "gpt2", "llama"])
def test_applied_and_undone(name: str) -> None:
    model, x = models()[name], torch.arange(12)[None]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)  # so that attention is far from uniform
    before = logits(model, x)
    undo = Temperature(tau=3.0).apply(model)
    assert len(temperature_settings(model)) == 2
    assert (logits(model, x) - before).abs().max() > 1e-3
    undo()
    assert torch.equal(logits(model, x), before)


@pytest.mark.parametrize("name", ["lab", "gpt2", "llama"])
def test_halving_the_scores_is_temperature_two(name: str) -> None:
    """τ = 4 equals queries made four times smaller, whatever the model's own scale."""
    model, x = models()[name], torch.arange(12)[None]
    undo = Temperature(tau=4.0).apply(model)
    warm = logits(model, x)
    undo()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "q_proj" in key:
                parameter.div_(4)
            elif "c_attn" in key:
                parameter[..., :16].div_(4)
    torch.testing.assert_close(logits(model, x), warm, rtol=1e-4, atol=1e-5)


def test_is_a_remedy() -> None:
    assert isinstance(Temperature(tau=2.0), Remedy)


def test_warmup_ends_at_exactly_one() -> None:
    warmup = TemperatureWarmup(start=7.3, steps=13)
    taus = [warmup.at(step) for step in range(20)]
    assert taus == sorted(taus, reverse=True) and taus[0] == 7.3
    assert taus[13:] == [1.0] * 7
    assert TemperatureWarmup(steps=0).at(0) == 1.0


def test_invalid_warmups_raise() -> None:
    with pytest.raises(InputError, match="Linear has no attention"):
        Temperature(tau=2.0).apply(nn.Linear(2, 2))
    with pytest.raises(InputError, match="tau of temperature must be positive"):
        Temperature(tau=0.0)
    with pytest.raises(InputError, match="start > 0"):
        TemperatureWarmup(start=0.0)
