"""What is examined: a class, how to build it small, and a batch that fits it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.constructed.configurations import (
    EXCEPTIONS,
    HEADS,
    classes,
    small_config,
)
from tests.zoo.specimens import TOKENS, tokens

Batch = dict[str, Any]
DECODED = 5
"""Tokens that a decoder reads beside its encoder's nine."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One class, and a batch for it."""

    name: str
    kind: str
    """Which mapping lists it, or where it is from."""
    build: Callable[[str], nn.Module]
    """From an attention implementation to a model in evaluation mode."""
    batch: Callable[[nn.Module], Batch]


def of_transformers() -> dict[str, Subject]:
    """Return every class of the auto-mappings, by name."""
    return {
        name: Subject(name=name, kind=kind, build=_builder(name), batch=batch_for)
        for name, kind in classes().items()
    }


def subjects() -> dict[str, Subject]:
    """Return everything that is examined, by name."""
    from tests.zoo.constructed.others import others

    return of_transformers() | others()


def _builder(name: str) -> Callable[[str], nn.Module]:
    def build(implementation: str) -> nn.Module:
        kind = getattr(transformers, name)
        config = small_config(kind.config_class, **EXCEPTIONS.get(name, {}))
        torch.manual_seed(0)
        config._attn_implementation = implementation
        config._experts_implementation = "eager"  # the fused one knows no float64
        model: nn.Module = kind(config)
        return model.eval()

    return build


def batch_for(model: nn.Module) -> Batch:
    """Return two sentences, the second two tokens shorter, as the model asks for it."""
    given: Batch = tokens()
    asked = inspect.signature(model.forward).parameters
    config: Any = model.config
    given |= BATCHES.get(type(model).__name__, lambda m: {})(model)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in asked:
        given.setdefault("decoder_input_ids", tokens()["input_ids"][:, :DECODED])
    if "use_cache" in asked:
        given["use_cache"] = False
    return {n: v for n, v in given.items() if n in asked and v is not None}


def _assisted(model: Any) -> Batch:
    """An assistant reads the states, and the keys and values, of a larger model."""
    text, rng = model.config.get_text_config(), torch.Generator().manual_seed(1)
    width = model.pre_projection.in_features
    layers = dict(zip(text.layer_types, model.model.layers, strict=True))
    return {
        "inputs_embeds": torch.randn(2, TOKENS, width, generator=rng),
        "input_ids": None,
        "shared_kv_states": {n: _keys(m.self_attn) for n, m in layers.items()},
    }


def _keys(attention: Any) -> tuple[Tensor, Tensor]:
    heads = HEADS // attention.num_key_value_groups
    rng = torch.Generator().manual_seed(heads)
    shape = (2, heads, TOKENS, attention.head_dim)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def _unmasked(model: Any) -> Batch:
    return {"attention_mask": None}


def _codebooks(model: Any) -> Batch:
    ids = tokens()["input_ids"].repeat_interleave(model.config.num_codebooks, 0)
    return {"input_ids": ids}


def _heard(model: Any) -> Batch:
    """Speech beside text: as many frames as the encoder makes nine tokens of."""
    frames = TOKENS * model.config.downsample_factor
    rng, width = torch.Generator().manual_seed(1), model.config.audio_config.hidden_size
    return {"encoder_inputs_embeds": torch.randn(2, frames, width, generator=rng)}


BATCHES: dict[str, Callable[[Any], Batch]] = {
    "Gemma4AssistantForCausalLM": _assisted,
    "Gemma4UnifiedAssistantForCausalLM": _assisted,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "BltForCausalLM": _unmasked,
    "NystromformerForMaskedLM": _unmasked,
    "VoxtralRealtimeForConditionalGeneration": _heard,
}
"""What some classes ask for beside token ids and a mask."""
