"""More of the zoo: families that were met after the tables were written."""

from typing import Any

import torch
from torch import Tensor

from tests.zoo.specimens import (
    ABSENT,
    CROSSED,
    D_MODEL,
    EAGER,
    EXPERTS,
    GROUPED,
    GUESSED,
    IMAGE,
    SEEN,
    SPECIMENS,
    Specimen,
    hugging,
    text,
    tokens,
)

SHARED = {"num_key_value_heads": 2}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED |= {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4}
LATENT |= {"num_key_value_heads": 4}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
LATENT |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "topk_group": 1}
SMALL = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
CONVOLVED = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (4, 4)}
CONVOLVED |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
CONVOLVED |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}


def sound() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    return {"input_values": torch.randn(2, 130, generator=rng)}


def translated() -> dict[str, Any]:
    """Return what a decoder reads beside its own sentence."""
    rng = torch.Generator().manual_seed(1)
    states: Tensor = torch.randn(2, 6, 32, generator=rng)
    return tokens(encoder_hidden_states=states)


HEARD: dict[str, Any] = {"batch": sound, "padded": ""}

WIDER = [
    Specimen(
        name="GPT2Model with cross-attention",
        build=hugging("GPT2Model", **SMALL, add_cross_attention=True),
        batch=translated,
        calls=4,
        crossed=(1, 3),
    ),
    text(
        "MptForCausalLM",
        **EAGER,
        d_model=32,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=32,
    ),
    text("StableLmForCausalLM", **SHARED),
    text("CohereForCausalLM", **SHARED),
    text("Cohere2ForCausalLM", **SHARED, sliding_window=4),
    text("OlmoForCausalLM", **SHARED),
    text("OlmoeForCausalLM", **SHARED, **ROUTED),
    text("GraniteForCausalLM", **SHARED),
    text("GraniteMoeForCausalLM", **SHARED, **EXPERTS),
    text("DeepseekV2ForCausalLM", **LATENT, **GUESSED),
    text("DeepseekV3ForCausalLM", **LATENT, **GUESSED),
    text("Qwen2MoeForCausalLM", **SHARED, **ROUTED),
    text("Qwen3MoeForCausalLM", **GROUPED, **ROUTED),
    text(
        "Llama4ForCausalLM",
        **GROUPED,
        intermediate_size_mlp=32,
        num_local_experts=2,
        attention_chunk_size=4,
    ),
    text("PhimoeForCausalLM", **SHARED, num_local_experts=4),
    text("NemotronForCausalLM", **GROUPED),
    text("SmolLM3ForCausalLM", **SHARED),
    text("Glm4ForCausalLM", **GROUPED),
    text("Exaone4ForCausalLM", **GROUPED, sliding_window=4),
    text("ArceeForCausalLM", **GROUPED),
    text("BitNetForCausalLM", **GROUPED),
    text("SeedOssForCausalLM", **GROUPED),
    text("DiffLlamaForCausalLM", **SHARED, **GUESSED, calls=4),
    text("PersimmonForCausalLM"),
    text("GPTBigCodeForCausalLM", **SMALL),
    text("CodeGenForCausalLM", **EAGER, **GUESSED, **SMALL, rotary_dim=4),
    text("BioGptModel"),
    text(
        "JambaForCausalLM",
        **SHARED,
        calls=1,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
    ),
    text("BambaForCausalLM", **SHARED, **MAMBA, calls=1, attn_layer_indices=[1]),
    text("Lfm2ForCausalLM", **SHARED, calls=1, layer_types=["conv", "full_attention"]),
    text("ModernBertModel", local_attention=4, global_attn_every_n_layers=2),
    text("DebertaModel", **EAGER),
    text("MPNetModel", **EAGER),
    text("RoFormerModel", **EAGER, embedding_size=32),
    text("EsmModel", mask_token_id=3),
    text("SqueezeBertModel", **EAGER, **GUESSED, embedding_size=32),
    text("BigBirdModel", **EAGER, attention_type="original_full"),
    text("MarianModel", **CROSSED, **D_MODEL),
    text("PegasusModel", **CROSSED, **D_MODEL),
    text("M2M100Model", **CROSSED, **D_MODEL),
    text("UMT5Model", **CROSSED, **T5),
    text("Dinov2Model", **SEEN, **IMAGE),
    text("BeitModel", **SEEN, **IMAGE),
    text(
        "SwinModel",
        **EAGER,
        **SEEN,
        **GUESSED,
        image_size=8,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[4, 4],
        window_size=2,
        num_hidden_layers=ABSENT,
        num_attention_heads=ABSENT,
        hidden_size=ABSENT,
    ),
    text(
        "SegformerModel",
        **EAGER,
        **SEEN,
        **GUESSED,
        num_encoder_blocks=1,
        depths=[2],
        sr_ratios=[2],
        hidden_sizes=[32],
        patch_sizes=[3],
        strides=[2],
        num_attention_heads=[4],
        mlp_ratios=[2],
    ),
    text("BlipVisionModel", **EAGER, **SEEN, **IMAGE),
    text("BlipTextModel", **EAGER, encoder_hidden_size=32, is_decoder=False),
    text("Wav2Vec2Model", **HEARD, **CONVOLVED),
    text("HubertModel", **HEARD, **CONVOLVED),
]
COLLECTION = [*SPECIMENS, *WIDER]
