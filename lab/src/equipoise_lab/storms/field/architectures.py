"""What a unit trains: small models of many families, each with its own kind of task."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["decoder", "masked", "seq2seq", "image"]
Part = Literal["open", "locked"]
WIDTH, LAYERS, HEADS = 48, 3, 4
LONGEST = 64
"""Tokens that every model of text can hold."""
BALANCE = 0.01
"""Factor of a router's auxiliary loss."""

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": LONGEST + 2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 12}
GPT: dict[str, Any] = {
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": LONGEST,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
BOTH: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
IMAGE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family of models, and what a unit feeds it."""

    name: str
    kind: Kind
    part: Part
    build: Callable[[int, int], nn.Module]
    """From vocabulary (or classes) and length to an untrained model."""


ARCHITECTURES: dict[str, Architecture] = {}


def names(part: Part) -> list[str]:
    """Return the architectures of one part, in the order they are listed."""
    return [name for name, one in ARCHITECTURES.items() if one.part == part]


def outputs(kind: Kind, model: nn.Module, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and the auxiliary loss, 0 where the model has none.

    The decoder of two-part models is fed the target, shifted, in ``given[:, 1]``.
    """
    if kind == "seq2seq":
        found = model(input_ids=given[:, 0], decoder_input_ids=given[:, 1])
    else:
        found = model(given)
    logits = found if isinstance(found, Tensor) else found.logits
    extra = getattr(found, "aux_loss", None)
    return logits, logits.new_zeros(()) if extra is None else BALANCE * extra


def _hugging(
    name: str, kind: Kind, part: Part, model: str, *, drop: str = "", **sizes: Any
) -> None:
    """List a model of ``transformers``; ``drop`` names sizes its config has not."""

    def build(vocabulary: int, length: int) -> nn.Module:
        import transformers

        given = {**SIZES, "vocab_size": vocabulary, **sizes}
        given = {key: item for key, item in given.items() if key not in drop.split()}
        if kind == "image":
            given = {**given, "num_labels": vocabulary}
        built = getattr(transformers, model)
        config = built.config_class(**given)
        config._attn_implementation = given.get("attention", "sdpa")
        config._experts_implementation = "eager"
        config.use_cache = False
        made: nn.Module = built(config)
        return made.train()

    ARCHITECTURES[name] = Architecture(name=name, kind=kind, part=part, build=build)


_hugging("gpt2", "decoder", "open", "GPT2LMHeadModel", **GPT)
_hugging("llama", "decoder", "open", "LlamaForCausalLM", num_key_value_heads=2)
_hugging("gemma2", "decoder", "open", "Gemma2ForCausalLM", **GROUPED, attention="eager")
_hugging("olmo2", "decoder", "open", "Olmo2ForCausalLM", num_key_value_heads=2)
_hugging("phi", "decoder", "open", "PhiForCausalLM")
_hugging(
    "mixtral",
    "decoder",
    "open",
    "MixtralForCausalLM",
    **GROUPED,
    **EXPERTS,
    output_router_logits=True,
)
_hugging("deepseek v3", "decoder", "open", "DeepseekV3ForCausalLM", **LATENT)
_hugging(
    "gpt-oss",
    "decoder",
    "open",
    "GptOssForCausalLM",
    **GROUPED,
    **EXPERTS,
    output_router_logits=True,
    attention="eager",
)
_hugging("roberta", "masked", "open", "RobertaForMaskedLM", pad_token_id=1)
_hugging(
    "vit",
    "image",
    "open",
    "ViTForImageClassification",
    **IMAGE,
    drop="vocab_size max_position_embeddings pad_token_id bos_token_id eos_token_id",
)
_hugging(
    "t5",
    "seq2seq",
    "open",
    "T5ForConditionalGeneration",
    d_model=WIDTH,
    d_kv=12,
    d_ff=2 * WIDTH,
    num_layers=2,
    num_heads=HEADS,
    decoder_start_token_id=0,
    pad_token_id=0,
    drop="hidden_size num_hidden_layers num_attention_heads",
)
_hugging(
    "bart",
    "seq2seq",
    "open",
    "BartForConditionalGeneration",
    **BOTH,
    drop="hidden_size num_hidden_layers num_attention_heads intermediate_size",
)
_hugging(
    "qwen3-next",
    "decoder",
    "open",
    "Qwen3NextForCausalLM",
    **GROUPED,
    **ROUTED,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=12,
    linear_value_head_dim=12,
    output_router_logits=True,
)

_hugging("gpt-neox", "decoder", "locked", "GPTNeoXForCausalLM")
_hugging(
    "opt", "decoder", "locked", "OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=WIDTH
)
_hugging(
    "bloom",
    "decoder",
    "locked",
    "BloomForCausalLM",
    n_head=HEADS,
    n_layer=LAYERS,
    attention="eager",
)
_hugging("falcon", "decoder", "locked", "FalconForCausalLM")
_hugging("gemma3", "decoder", "locked", "Gemma3ForCausalLM", **GROUPED)
_hugging("qwen3", "decoder", "locked", "Qwen3ForCausalLM", **GROUPED)
_hugging(
    "qwen3-moe",
    "decoder",
    "locked",
    "Qwen3MoeForCausalLM",
    **GROUPED,
    **ROUTED,
    output_router_logits=True,
)
_hugging("granite", "decoder", "locked", "GraniteForCausalLM", num_key_value_heads=2)
_hugging("phi3", "decoder", "locked", "Phi3ForCausalLM", num_key_value_heads=2)
_hugging("cohere", "decoder", "locked", "CohereForCausalLM", num_key_value_heads=2)
_hugging("nemotron", "decoder", "locked", "NemotronForCausalLM", **GROUPED)
_hugging("starcoder2", "decoder", "locked", "Starcoder2ForCausalLM")
_hugging("glm4", "decoder", "locked", "Glm4ForCausalLM", **GROUPED)
_hugging(
    "bamba",
    "decoder",
    "locked",
    "BambaForCausalLM",
    **MAMBA,
    mamba_chunk_size=16,
    num_key_value_heads=2,
    attn_layer_indices=[1],
)
_hugging(
    "lfm2",
    "decoder",
    "locked",
    "Lfm2ForCausalLM",
    num_key_value_heads=2,
    layer_types=["conv", "full_attention", "conv"],
)
_hugging("electra", "masked", "locked", "ElectraForMaskedLM", embedding_size=24)
_hugging("albert", "masked", "locked", "AlbertForMaskedLM", embedding_size=24)
_hugging(
    "modernbert",
    "masked",
    "locked",
    "ModernBertForMaskedLM",
    local_attention=8,
    global_attn_every_n_layers=2,
    pad_token_id=1,
)
_hugging(
    "marian",
    "seq2seq",
    "locked",
    "MarianMTModel",
    **BOTH,
    drop="hidden_size num_hidden_layers num_attention_heads intermediate_size",
)
_hugging(
    "pegasus",
    "seq2seq",
    "locked",
    "PegasusForConditionalGeneration",
    **BOTH,
    drop="hidden_size num_hidden_layers num_attention_heads intermediate_size",
)
_hugging(
    "dinov2",
    "image",
    "locked",
    "Dinov2ForImageClassification",
    **IMAGE,
    mlp_ratio=2,
    drop="vocab_size max_position_embeddings pad_token_id bos_token_id eos_token_id",
)


class Encoder(nn.Module):
    """torch's own encoder with learned positions, as tutorials write it."""

    def __init__(self, vocabulary: int, *, norm_first: bool, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.1, batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.causal = causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=self.causal))
        return logits


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class NanoBlock(nn.Module):
    """Norms without gains, normed queries and keys, squared ReLU, zero projections."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.c_proj.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = _normed(x)
        q, k, v = (
            one(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for one in (self.c_q, self.c_k, self.c_v)
        )
        read = F.scaled_dot_product_attention(_normed(q), _normed(k), v, is_causal=True)
        x = x + self.c_proj(read.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.relu(self.up(_normed(x))).square())
        return out


class Nano(nn.Module):
    """A decoder in nanochat's manner, written for this field."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(LONGEST, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.001)

    def forward(self, ids: Tensor) -> Tensor:
        x = _normed(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(_normed(x))
        return 15 * torch.tanh(logits / 15)


class Joint(nn.Module):
    """A decoder whose attention and feed-forward network read the stream together."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mixed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for i in range(LAYERS):
            h = self.norms[i](x)
            q, k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in self.qkv[i](h).chunk(3, -1)
            )
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mixed[i](read.transpose(1, 2).flatten(-2))
            x = x + self.narrow[i](F.gelu(self.wide[i](h)))
        logits: Tensor = self.head(self.last(x))
        return logits


def _own(name: str, kind: Kind, part: Part, make: Callable[[int], nn.Module]) -> None:
    def build(vocabulary: int, length: int) -> nn.Module:
        return make(vocabulary).train()

    ARCHITECTURES[name] = Architecture(name=name, kind=kind, part=part, build=build)


_own("encoder", "masked", "open", lambda v: Encoder(v, norm_first=True, causal=False))
_own("nano", "decoder", "open", Nano)
_own("post-LN", "decoder", "open", lambda v: Encoder(v, norm_first=False, causal=True))
_own("joint", "decoder", "locked", Joint)
_own(
    "post-LN encoder",
    "masked",
    "locked",
    lambda v: Encoder(v, norm_first=False, causal=False),
)
