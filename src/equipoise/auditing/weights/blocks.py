"""What feeds the attention and the feed-forward net of a block, by type of model.

A Lipschitz bound needs more than weights: the norm whose output the maps read, how its
γ is stored, the scale of the scores, the activation. None of it can be read off a
tensor, so it is declared here for the types that were read in their source. A type
that is not here has no bound: a guess is never printed as one.

Paths are relative to the block; ``a|b`` is a where it exists and b otherwise. A norm
that begins with ``^`` is the previous block's; what follows ``^^`` is the one before
the first block, found beside the stack or above it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = Mapping[str, Any]


def root_width(config: Config, width: int) -> float:
    """Return 1/√d_h, the usual scale of the scores."""
    return float(width**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One type of block, as its source has it."""

    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    maps: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    """Up and down; gate, up and down. Empty: experts."""
    fused: bool = False
    """Whether the first map holds gate and up as its halves."""
    feedforward_norm: str = "post_attention_layernorm"
    offset: float = 0.0
    """What is added to the stored γ."""
    bare: bool = False
    """Whether the norms have no γ."""
    activation: str = "hidden_act activation_function hidden_activation"
    """Names of the configuration's entry, or ``=`` and the activation itself."""
    scale: Callable[[Config, int], float] = root_width
    """Configuration and d_h → the factor of q·k."""
    refused: tuple[tuple[str, str], ...] = field(default=())
    """Entry of the configuration that rules a bound out → the reason."""
    without: str = ""
    """Reason why neither attention nor feed-forward has a bound."""
    attention_without: str = ""
    """Reason why attention has none, where the feed-forward net does."""


def _one(config: Config, width: int) -> float:
    return 1.0


def _gpt2(config: Config, width: int) -> float:
    # By inverse layer index the scale is only smaller: this one still bounds it.
    scaled = config.get("scale_attn_weights", True)
    return root_width(config, width) if scaled else 1.0


def _entry(name: str) -> Callable[[Config, int], float]:
    def scale(config: Config, width: int) -> float:
        return float(config.get(name, math.nan))

    return scale


def _query_scalar(config: Config, width: int) -> float:
    return 1 / math.sqrt(config.get("query_pre_attn_scalar", math.nan))


def _mpt(config: Config, width: int) -> float:
    own = config.get("attn_config") or {}
    return float(own.get("softmax_scale") or root_width(config, width))


QK_NORM = (("qk_layernorm", "qk_norm"), ("use_qk_norm", "qk_norm"))
CLIPPED = (("clip_qkv", "clipped"),)

LLAMA = BlockType()
LAYERS = ("mlp.fc1", "mlp.fc2")
OUTSIDE = BlockType(
    attention_norm="self_attn_layer_norm",
    maps=("fc1", "fc2"),
    feedforward_norm="final_layer_norm",
)
BART = BlockType(
    attention_norm="^final_layer_norm^^layernorm_embedding",
    maps=("fc1", "fc2"),
    feedforward_norm="encoder_attn_layer_norm|self_attn_layer_norm",
)
BERT = BlockType(
    attention="attention.self",
    attention_norm="^output.LayerNorm^^embeddings.LayerNorm",
    maps=("intermediate.dense", "output.dense"),
    feedforward_norm="crossattention.output.LayerNorm|attention.output.LayerNorm",
    refused=(("rotary_value", "rotated_values"),),
)
GPT2 = BlockType(
    attention="attn",
    attention_norm="ln_1",
    maps=("mlp.c_fc", "mlp.c_proj"),
    feedforward_norm="ln_2",
    scale=_gpt2,
)
NEOX = BlockType(
    attention="attention",
    maps=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)
BLOOM = replace(NEOX, attention="self_attention", activation="=gelu_tanh")
FALCON = replace(
    NEOX,
    attention="self_attention",
    attention_norm="ln_attn|input_layernorm",
    feedforward_norm="ln_mlp|post_attention_layernorm|input_layernorm",
    activation="activation",
)
MPT = BlockType(
    attention="attn",
    attention_norm="norm_1",
    maps=("ffn.up_proj", "ffn.down_proj"),
    feedforward_norm="norm_2",
    activation="=gelu",
    scale=_mpt,
    refused=(("attn_config.clip_qkv", "clipped"), ("attn_config.qk_ln", "qk_norm")),
)
VIT = BlockType(
    attention="attention|attention.attention",
    attention_norm="layernorm_before",
    maps=("mlp.fc1|intermediate.dense", "mlp.fc2|output.dense"),
    feedforward_norm="layernorm_after",
)
CLIP = BlockType(
    attention_norm="layer_norm1", maps=LAYERS, feedforward_norm="layer_norm2"
)
T5 = BlockType(
    attention="layer.0.SelfAttention",
    attention_norm="layer.0.layer_norm",
    maps=(
        "layer.2.DenseReluDense.wi|layer.1.DenseReluDense.wi",
        "layer.2.DenseReluDense.wo|layer.1.DenseReluDense.wo",
    ),
    feedforward_norm="layer.2.layer_norm|layer.1.layer_norm",
    activation="dense_act_fn",
    scale=_one,
)
T5_GATED = replace(
    T5,
    maps=(
        "layer.2.DenseReluDense.wi_0|layer.1.DenseReluDense.wi_0",
        "layer.2.DenseReluDense.wi_1|layer.1.DenseReluDense.wi_1",
        "layer.2.DenseReluDense.wo|layer.1.DenseReluDense.wo",
    ),
)
GEMMA = replace(LLAMA, offset=1.0)
EXPERTS = replace(LLAMA, maps=())

BLOCKS: dict[str, BlockType] = {
    **dict.fromkeys("llama mistral qwen2 smollm3 seed_oss helium".split(), LLAMA),
    **dict.fromkeys("ernie4_5 ministral".split(), LLAMA),
    "granite": replace(LLAMA, scale=_entry("attention_multiplier")),
    "granitemoe": replace(EXPERTS, scale=_entry("attention_multiplier")),
    **dict.fromkeys("mixtral qwen2_moe phimoe".split(), EXPERTS),
    "gemma": GEMMA,
    "gemma2": replace(
        GEMMA, feedforward_norm="pre_feedforward_layernorm", scale=_query_scalar
    ),
    "gemma3_text": replace(
        GEMMA,
        feedforward_norm="pre_feedforward_layernorm",
        attention_without="qk_norm",
    ),
    "qwen3": replace(LLAMA, attention_without="qk_norm"),
    **dict.fromkeys(
        "qwen3_moe olmoe".split(), replace(EXPERTS, attention_without="qk_norm")
    ),
    **dict.fromkeys("olmo2 olmo3 exaone4".split(), BlockType(without="not_normed")),
    "olmo": replace(LLAMA, bare=True, refused=CLIPPED),
    "stablelm": replace(
        LLAMA,
        feedforward_norm="post_attention_layernorm|input_layernorm",
        refused=QK_NORM,
    ),
    **dict.fromkeys(
        "cohere cohere2".split(),
        replace(LLAMA, feedforward_norm="input_layernorm", refused=QK_NORM),
    ),
    "arcee": replace(LLAMA, maps=("mlp.up_proj", "mlp.down_proj")),
    "nemotron": replace(LLAMA, maps=("mlp.up_proj", "mlp.down_proj"), offset=1.0),
    "phi": replace(
        LLAMA, maps=LAYERS, feedforward_norm="input_layernorm", refused=QK_NORM
    ),
    **dict.fromkeys(
        "phi3 glm".split(),
        replace(LLAMA, maps=("mlp.gate_up_proj", "mlp.down_proj"), fused=True),
    ),
    "starcoder2": replace(LLAMA, maps=("mlp.c_fc", "mlp.c_proj")),
    "gpt2": GPT2,
    "gpt_neo": replace(GPT2, attention="attn.attention", scale=_one),
    "gptj": replace(
        GPT2,
        maps=("mlp.fc_in", "mlp.fc_out"),
        feedforward_norm="ln_1",
        scale=root_width,
    ),
    "gpt_neox": NEOX,
    "bloom": BLOOM,
    "falcon": FALCON,
    "mpt": MPT,
    "opt": replace(OUTSIDE, refused=(("!do_layer_norm_before", "not_normed"),)),
    **dict.fromkeys("biogpt whisper pegasus m2m_100 mbart xglm".split(), OUTSIDE),
    **dict.fromkeys("bart marian mvp".split(), BART),
    **dict.fromkeys("bert roberta camembert xlm-roberta electra".split(), BERT),
    **dict.fromkeys("data2vec-text roformer visual_bert tapas".split(), BERT),
    "blip_text_model": BERT,
    "distilbert": BlockType(
        attention="attention",
        attention_norm="^output_layer_norm^^embeddings.LayerNorm",
        maps=("ffn.lin1", "ffn.lin2"),
        feedforward_norm="sa_layer_norm",
        activation="activation",
    ),
    **dict.fromkeys("vit deit vit_msn ijepa".split(), VIT),
    "dinov2": replace(VIT, attention_norm="norm1", feedforward_norm="norm2"),
    **dict.fromkeys("clip_text_model clip_vision_model".split(), CLIP),
    **dict.fromkeys("siglip_vision_model siglip_text_model".split(), CLIP),
    "t5": T5,
    "mt5": T5_GATED,
    "umt5": T5_GATED,
    "apertus": BlockType(
        attention_norm="attention_layernorm",
        maps=("mlp.up_proj", "mlp.down_proj"),
        feedforward_norm="feedforward_layernorm",
        attention_without="qk_norm",
    ),
    "gpt_oss": replace(EXPERTS, attention_without="sinks"),
    "persimmon": replace(NEOX, attention="self_attn", refused=QK_NORM),
    "bitnet": BlockType(without="inner_norm"),
}
"""``model_type`` of a Hugging Face configuration → its block."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""A configuration's name → ours."""


def activation_of(block: BlockType, config: Config) -> str | None:
    """Return the activation's name, None where the configuration names none we know."""
    if block.activation.startswith("="):
        return block.activation[1:]
    given = (config.get(name) for name in block.activation.split())
    return ACTIVATIONS.get(str(next((g for g in given if g is not None), "")))


def refusal(block: BlockType, config: Config) -> str:
    """Return why this configuration of a described type has no bound, if it has none.

    >>> refusal(BLOCKS["phi"], {"qk_layernorm": True})
    'qk_norm'
    """
    if block.without:
        return block.without
    for path, reason in block.refused:
        value: Any = config
        for part in path.removeprefix("!").split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        wanted = value is False if path.startswith("!") else bool(value)
        if wanted:
            return reason
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    named = [rotation, *rotation.values()] if isinstance(rotation, Mapping) else []
    kinds = {
        str(part.get("rope_type", part.get("type", "default")))
        for part in named
        if isinstance(part, Mapping)
    }
    # Yarn and LongRoPE multiply q and k by a factor of their own.
    return "" if kinds <= {"default", "linear", "dynamic", "llama3"} else "scaled_rope"
