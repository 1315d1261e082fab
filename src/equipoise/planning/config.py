"""The size and kind of a model from its Hugging Face ``config.json`` alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.errors import InputError
from equipoise.records import json_object

LARGEST = 4 << 20
"""Bytes of a configuration; a larger file is something else."""
SIZES = {
    "depth": ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": (
        *("num_attention_heads", "n_head", "num_heads"),
        "encoder_attention_heads",
    ),
}
"""What a plan needs → the names that configurations give it."""
INSIDE = ("text_config", "language_config", "llm_config", "decoder")
"""Where a model of several parts keeps its language model."""
POST_NORM = {
    *("albert", "bart", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "flaubert", "layoutlm", "marian", "mpnet"),
    *("openai-gpt", "roberta", "roformer", "xlm", "xlm-roberta", "xlnet"),
}
"""Model types whose norms follow the residual sum."""
GATED = {
    *("cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "granite", "llama", "mistral", "mixtral", "modernbert", "olmo"),
    *("olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    "stablelm",
}
"""Model types whose feed-forward nets are gated, and whose configurations say no more;
T5's say so themselves."""
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def options_of(path: Path) -> dict[str, Any]:
    """Return what a plan can be made with, as far as a configuration says it.

    Args:
        path: A ``config.json``, or the directory of a model that has one.

    Raises:
        InputError: If there is none, or it does not say how large the model is.
    """
    file = path / "config.json" if path.is_dir() else path
    outer = _loaded(file)
    config = next((outer[k] for k in INSIDE if _has_sizes(outer.get(k))), outer)
    sizes = {name: _size(config, name, file) for name in SIZES}
    return {**sizes, **_kind({**outer, **config})}


def _loaded(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(
            f"{file}: no such file; give a Hugging Face directory, a config.json, "
            "or --depth, --width and --heads"
        )
    if file.stat().st_size > LARGEST:
        raise InputError(f"{file}: too large to be a model's configuration")
    return json_object(file.read_bytes(), file)


def _has_sizes(config: object) -> bool:
    return isinstance(config, Mapping) and any(k in config for k in SIZES["depth"])


def _size(config: Mapping[str, Any], name: str, file: Path) -> int:
    for key in SIZES[name]:
        if isinstance(config.get(key), int):
            return int(config[key])
    known = ", ".join(SIZES[name])
    raise InputError(f"{file} does not say the {name} ({known}): give --{name}")


def _kind(config: Mapping[str, Any]) -> dict[str, str]:
    """Return norm, its place and format, and the net, where they are configured."""
    norm = "rmsnorm" if "rms_norm_eps" in config else "layernorm"
    post = config.get("model_type") in POST_NORM
    kind = {"norm": norm, "residual": "post" if post else "pre"}
    declared = "gated" in str(config.get("feed_forward_proj", ""))
    if declared or config.get("model_type") in GATED:
        kind["feedforward"] = "gated"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    if dtype in PRECISIONS:
        kind["precision"] = PRECISIONS[dtype]
    return kind
