"""Small configurations of every class in ``transformers``' auto-mappings.

No class is chosen by hand: a configuration's defaults are made small by what their
names say, in all nested parts, and every kind of layer stays. What a class asks for
beyond that is listed in ``EXCEPTIONS``, with what it makes of the numbers.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

Options = dict[str, Any]

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


def classes() -> dict[str, str]:
    """Return class name → the kind of its first mapping, in the mappings' order."""
    found: dict[str, str] = {}
    for kind, mapping in MAPPINGS.items():
        for names in mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


# The token axis has nine tokens, and five in a decoder: no width is either number.
WIDTH, HEADS, VOCABULARY, POSITIONS, EXPERTS = 32, 4, 64, 64, 4

SIZES: dict[str, int] = {
    # widths of the residual stream, and of what is added to it
    r"(\w+_)?hidden_size|d_model|n_embd|(\w+_)?embed(ding)?_(dim|size)|emb_dim": WIDTH,
    r"dim|model_dim|output_dim|word_embed_proj_dim|lru_width|d_latents": WIDTH,
    r"hidden_size_global|projection_dim|codebook_dim|entity_emb_size": WIDTH,
    r"vector_quantization_hidden_dimension|upsample_initial_channel": WIDTH,
    r"nemo_conv_channels|ext_pw_out_channel|depthwise_separable_out_channel": WIDTH,
    # layers and heads
    r"(\w+_)?num_(\w+_)?layers(_per_stack)?|num_blocks|n_layers?": 2,
    r"(\w+_)?(en|de)coder_layers": 2,
    r"(\w+_)?num_(\w+_)?attention_heads|n_heads?|num_heads|attention_heads": HEADS,
    r"(\w+_)?(en|de)coder_attention_heads|linear_num_heads": HEADS,
    r"(\w+_)?num_(\w+_)?key_value_heads|num_kv_heads|kv_n_heads|num_query_groups": 2,
    r"head_dim|d_head|dim_head|d_kv|kv_channels|swa_head_dim|global_head_dim": 8,
    r"linear_((key|value)_)?head_dim|index_head_dim|qk_nope_head_dim|v_head_dim": 8,
    r"attention_head_(size|dim)|linear_attn_head_dim|hidden_size_per_layer_input": 8,
    r"qk_head_dim": 12,
    r"qk_rope_head_dim": 4,
    r"(kv|q|o)_lora_rank|router_hidden_size|hc_lowrank|gated_norm_rank": 16,
    r"laurel_rank|adapter_rank|embedding_rank|d_rel": 16,
    # feed-forward networks and experts
    r"intermediate_size|\w+ffn_dim|ffn_dim|d_ff|dff|dim_ff|hidden_dim|d_inner": 48,
    r"feed_forward_size|ffn_hidden_size|dense_intermediate_size|mlp_dim": 48,
    r"speech_encoder_intermediate_size|n_inner|(\w+_)?mlp_dim": 48,
    r"(\w+_)?moe_(\w+_)?intermediate_size|shared_(expert_)?intermediate_size": 24,
    r"intermediate_size_mlp|expert_ffn_hidden_size": 24,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts": EXPERTS,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|n_group|num_expert_group": 2,
    r"zero_expert_num": 2,
    r"(n|num|moe_num)_shared_experts|topk_group": 1,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    # tokens, positions and windows
    r"(\w+_)?vocab_size|vocab_size_per_layer_input|encoder_hash_byte_group_vocab": (
        VOCABULARY
    ),
    r"ngram_vocab_size_base|codebook_size|num_centroids": VOCABULARY,
    r"(\w+_)?max_(\w+_)?position_embeddings|n_positions|n_ctx|max_seq_len": POSITIONS,
    r"context_length|max_(source|target)_positions|model_max_length": POSITIONS,
    r"rel_extent|max_pos_emb|max_length": POSITIONS,
    r"sliding_window(_size)?|window_size|local_attention|attention_chunk_size": 4,
    r"local_radius|keep_window_size|attention_window(_size)?|index_topk": 4,
    # mixers without softmax
    r"linear_num_key_heads|index_n_heads|n_mamba_heads": 2,
    r"linear_num_value_heads|linear_attn_num_heads|mamba_n_heads": HEADS,
    r"mamba_num_heads|mamba_dt_rank|time_step_rank": 4,
    r"mamba_d_state|state_size|ssm_state_size|d_state|mamba_chunk_size": 8,
    r"chunk_size": 8,
    r"mamba_d_head|mamba_head_dim|mamba_headdim": 16,
    r"mamba_n_groups|mamba_ngroups|n_groups": 1,
    r"mamba_d_ssm": 64,
    # what else is large
    r"image_size|crop_size": 32,
    r"num_mel_bins|input_feat_size": 80,
    r"num_landmarks|num_self_attends_per_block|num_heads_per_ngram": 2,
    r"ngram_size|heads_per_ngram": 2,
    r"num_latents": 6,
    r"prompt_length|hc_sinkhorn_iters": 3,
    r"num_buckets|upsample_groups": 4,
    r"split_ngram_parts|make_ngram_vocab_size_divisible_by": 1,
}
_SIZES = [(re.compile(pattern), size) for pattern, size in SIZES.items()]
# Ten times the usual spread: logits of order one, so that a wrong mask would show.
SPREAD = {"initializer_range", "init_std", "initializer_factor"}
LAYERS = ("layer_types", "layers_block_type")
"""Lists of what each layer is: every kind stays."""
BESIDE = ("mlp_layer_types", "indexer_types")
"""Lists of what else each layer has."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS |= {"decoder_start_token_id": 1, "sep_token_id": 2, "mask_token_id": 3}


def small_config(kind: type[PretrainedConfig], **asked: Any) -> PretrainedConfig:
    """Return a small configuration of a class.

    >>> from transformers import LlamaConfig
    >>> small_config(LlamaConfig).hidden_size
    32
    """
    try:
        usual = vars(kind())
    except Exception:  # a few have defaults that they refuse themselves
        usual = {}
    given = {name: made for name in usual for made in _small(name, usual[name])}
    given |= _layers(usual, given) | _latent(usual)
    for name, value in (EXCEPTIONS.get(kind.__name__, {}) | asked).items():
        given[name] = _nested(*value) if isinstance(value, Nested) else value
    return kind(**given)


def _latent(usual: Options) -> Options:
    """Return the sizes of latent attention: a key for every head, one rotary width."""
    if "kv_lora_rank" not in usual:
        return {}
    heads: Options = {"num_key_value_heads": HEADS}
    rotary = usual.get("head_dim") == usual.get("qk_rope_head_dim")
    return heads | ({"head_dim": 4} if rotary and "head_dim" in usual else {})


class Nested(NamedTuple):
    """A configuration within another, and what it is asked for beyond being small."""

    kind: str
    asked: Options


def _nested(kind: str, asked: Options) -> PretrainedConfig:
    every = {c.__name__: c for c in _subclasses(PretrainedConfig)}
    return small_config(every[kind], **asked)


def _subclasses(kind: type[PretrainedConfig]) -> Iterator[type[PretrainedConfig]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _small(name: str, value: Any) -> Iterator[Any]:
    """Yield a smaller value for an option, if its name says that it is a size."""
    if isinstance(value, PretrainedConfig):
        yield small_config(type(value))
    elif name in TOKENS and isinstance(value, int):
        yield TOKENS[name]
    elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
        yield min(value, VOCABULARY - 1 - len(name) % 8)
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        size = next((s for p, s in _SIZES if p.fullmatch(name)), value)
        yield min(value, size)
    elif name in SPREAD and isinstance(value, float):
        yield max(value, 0.2)
    elif isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
        yield 0.0


def _layers(usual: Options, given: Options) -> Options:
    """Return as many layers as there are kinds of them, and at least two."""
    made: Options = {}
    for name in LAYERS:
        kinds = list(dict.fromkeys(usual.get(name) or ()))
        if not kinds:
            continue
        count = max(2, len(kinds))
        made[name] = (kinds * 2)[:count]
        counted = (n for n in given if re.fullmatch(r"num_hidden_layers|n_layers?", n))
        made |= dict.fromkeys(counted, count)
        for other in BESIDE:
            beside = list(dict.fromkeys(usual.get(other) or ()))
            made |= {other: (beside * count)[:count]} if beside else {}
    return made


EXPERT_COUNTS: Options = {"n_routed_experts": 4, "num_experts_per_tok": 2}
FACING: Options = {"attn_layer_period": 2, "attn_layer_offset": 1}
ROPE: Options = {"rope_type": "default", "rope_theta": 10000.0}
SHARED: Options = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
SHARED |= {"num_kv_shared_layers": 2}

# By configuration, or by model where two share one.
EXCEPTIONS: dict[str, Options] = {
    "CohereCompassTextConfig": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "Dots1Config": {**EXPERT_COUNTS, "n_shared_experts": 1},
    "FalconH1Config": {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
    },
    "BambaConfig": {"attn_layer_indices": [1]},
    "BigBirdConfig": {"attention_type": "original_full"},
    "BigBirdPegasusConfig": {"attention_type": "original_full"},
    "CodeGenConfig": {"rotary_dim": 4},
    "DbrxConfig": {
        "attn_config": Nested("DbrxAttentionConfig", {"rope_theta": 1e4, "clip_qkv": 8})
    },
    "GPTJConfig": {"rotary_dim": 4},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "MobileBertConfig": {"intra_bottleneck_size": 32},
    "NystromformerConfig": {"num_landmarks": 3, "segment_means_seq_len": 9},
    "PegasusXConfig": {"num_global_tokens": 3, "block_size": 4},
    "XmodConfig": {"default_language": "en_XX"},
    "Gemma4AssistantConfig": {"text_config": Nested("Gemma4TextConfig", SHARED)},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "JambaConfig": {**FACING, "use_mamba_kernels": False},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": 8},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "ZambaConfig": {"layers_block_type": ["linear_attention", "hybrid"] * 2}
    | {"num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Zamba2Config": {
        "n_mamba_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "EsmConfig": {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3},
    "EsmcConfig": {"num_key_value_heads": 4},
    "NeoMMEConfig": {"head_dim": 16},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 2, "depths": [1] * 7},
    "GraniteSpeechEncoderConfig": {"context_size": 8},
    "GraniteSpeechPlusEncoderConfig": {"context_size": 8},
}
