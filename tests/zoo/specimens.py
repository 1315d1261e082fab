"""The zoo's inmates: how to build each, and what to feed it.

Tokens are few (at most 10) because the reference tries every subset of the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo import handwritten, vision

TOKENS, VOCABULARY = 9, 50
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "vocab_size": VOCABULARY, "pad_token_id": 0}
SIZES |= {"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
# Ten times the usual spread: logits of order one, so that a wrong mask would show.
SIZES |= {"initializer_range": 0.2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
D_MODEL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
D_MODEL |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
D_MODEL |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCABULARY}
D_MODEL |= {
    "init_std": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ABSENT = object()
IMAGE = {"image_size": 8, "patch_size": 4}


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """One model class, and a batch for it."""

    name: str
    build: Callable[[str], nn.Module]
    """From an attention implementation to a model."""
    batch: Callable[[], dict[str, Any]]
    implementations: tuple[str, ...] = ("sdpa", "eager")
    calls: int = 2
    """How many attention calls one forward pass makes."""
    declared: bool = True
    """Whether a family's table covers it."""
    padded: str = "attention_mask"
    """Which entry of the batch says what is padding, for the self-attention calls."""
    crossed: tuple[int, ...] = field(default=())
    """Which calls are cross-attention, whose queries are not their keys."""


def tokens(**extra: Any) -> dict[str, Any]:
    """Return two sentences, the second two tokens shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, **extra}


def images() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


def both() -> dict[str, Any]:
    """Return what an encoder and a decoder read."""
    return tokens(decoder_input_ids=tokens()["input_ids"][:, :5])


def speech() -> dict[str, Any]:
    sound = torch.randn(2, 80, 12, generator=torch.Generator().manual_seed(0))
    return {"input_features": sound, "decoder_input_ids": tokens()["input_ids"][:, :5]}


def hugging(name: str, **sizes: Any) -> Callable[[str], nn.Module]:
    """Return a builder of ``transformers``' model of this name."""

    def build(implementation: str) -> nn.Module:
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        given = {**SIZES, **sizes}
        given = {key: given[key] for key in given if given[key] is not ABSENT}
        config = kind.config_class(**given)
        config._experts_implementation = "eager"  # the fused one knows no float64
        config._attn_implementation = implementation
        model: nn.Module = kind(config)
        return model.eval()

    return build


def text(name: str, **options: Any) -> Specimen:
    """Return a specimen that reads padded sentences."""
    known = {f for f in Specimen.__dataclass_fields__ if f in options}
    mine = {key: options.pop(key) for key in known}
    return Specimen(
        **{"name": name, "build": hugging(name, **options), "batch": tokens, **mine}
    )


EAGER = {"implementations": ("eager",)}
SEEN = {"batch": images, "padded": ""}
CROSSED = {"batch": both, "calls": 6, "crossed": (3, 5)}
GUESSED = {"declared": False}

SPECIMENS = [
    text("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2),
    text("LlamaForCausalLM", num_key_value_heads=2),
    text("MistralForCausalLM", **GROUPED, sliding_window=4),
    text("Qwen2ForCausalLM", num_key_value_heads=2),
    text("Qwen3ForCausalLM", **GROUPED),
    text("GemmaForCausalLM", **GROUPED),
    text("Gemma2ForCausalLM", **GROUPED, **EAGER, attn_logit_softcapping=2.0),
    text("Gemma3ForCausalLM", **GROUPED),
    text("GPTNeoXForCausalLM"),
    text("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    text("BertModel"),
    text("RobertaModel"),
    text("DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    text("AlbertModel", embedding_size=16),
    text("ViTModel", **SEEN, **IMAGE),
    text("DeiTModel", **SEEN, **IMAGE),
    Specimen(
        name="CLIPModel",
        build=vision.clip,
        batch=lambda: {**tokens(), **images()},
        calls=4,
    ),
    text(
        "T5ForConditionalGeneration",
        **CROSSED,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    ),
    text(
        "WhisperModel",
        **(CROSSED | {"batch": speech, "padded": ""}),
        **D_MODEL,
        max_source_positions=6,
    ),
    text("MixtralForCausalLM", **GROUPED, **EXPERTS),
    text("GptOssForCausalLM", **GROUPED, **EXPERTS, **EAGER),
    text("BloomForCausalLM", **EAGER, n_head=4, n_layer=2),
    text("FalconForCausalLM"),
    text("BartModel", **CROSSED, **D_MODEL),
    text("ElectraModel", embedding_size=16),
    text("Phi3ForCausalLM", num_key_value_heads=2),
    text("Starcoder2ForCausalLM", num_key_value_heads=2),
    text("Olmo2ForCausalLM", num_key_value_heads=2),
    text("SiglipVisionModel", **SEEN, **IMAGE, calls=3),
    text("GPTJForCausalLM", **EAGER, n_embd=32, n_head=4, n_layer=2, rotary_dim=4),
    text("DebertaV2Model", **EAGER),
    text(
        "XLNetModel",
        **EAGER,
        **GUESSED,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
        max_position_embeddings=ABSENT,
    ),
    text("PhiForCausalLM", **GUESSED),
    text(
        "GPTNeoForCausalLM",
        **EAGER,
        **GUESSED,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    Specimen(
        name="nn.TransformerEncoder",
        build=handwritten.encoder,
        batch=handwritten.padded,
        padded="src_key_padding_mask",
        implementations=("training", "evaluation"),
    ),
    Specimen(
        name="nn.Transformer",
        build=handwritten.transformer,
        batch=handwritten.two_sequences,
        padded="",
        calls=6,
        crossed=(3, 5),
        implementations=("training", "evaluation"),
    ),
    Specimen(
        name="nanoGPT", build=handwritten.nano_gpt, batch=handwritten.plain, padded=""
    ),
    Specimen(
        name="timm-shaped ViT",
        build=vision.timm_shaped,
        batch=vision.patches,
        padded="",
    ),
    Specimen(
        name="lab GPT",
        build=handwritten.lab_gpt,
        batch=handwritten.plain,
        padded="",
        implementations=("rope", "softcap", "grouped", "shared"),
    ),
    Specimen(
        name="lab ViT",
        build=handwritten.lab_vit,
        batch=handwritten.picture,
        padded="",
        implementations=("cls", "mean"),
    ),
]


def padding(specimen: Specimen, batch: dict[str, Any]) -> Tensor | None:
    """Return (B, T), True for real tokens, or None where nothing is padded."""
    mask: Tensor | None = batch.get(specimen.padded)
    if mask is None:
        return None
    return ~mask if mask.dtype == torch.bool else mask.bool()
