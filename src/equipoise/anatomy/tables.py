"""The families we know: Hugging Face, timm, nanoGPT, torch.nn and our own lab."""

from torch import nn

from equipoise.anatomy.families import Block, Declaration, Fused, Separate
from equipoise.anatomy.sites import Placement


def _norm_first(module: nn.Module) -> Placement:
    first = getattr(module, "norm_first", getattr(module, "do_layer_norm_before", True))
    return "pre" if first else "post"


def _residual(module: nn.Module) -> Placement:
    """Our lab's block names its own form; both DeepNorms close the sum with a norm."""
    forms: dict[str, Placement] = {"pre": "pre", "sandwich": "sandwich"}
    return forms.get(str(getattr(module, "residual", "pre")), "post")


LLAMA = Separate(q="q_proj", k="k_proj", v="v_proj", o="o_proj")
OPT = Separate(q="q_proj", k="k_proj", v="v_proj", o="out_proj")
BERT = Separate(q="query", k="key", v="value", o="..output.dense")
DISTILBERT = Separate(q="q_lin", k="k_lin", v="v_lin", o="out_lin")
ALBERT = Separate(q="query", k="key", v="value", o="dense")
T5 = Separate(q="q", k="k", v="v", o="o")
LAB = Separate(q="q_proj", k="k_proj|q_proj", v="v_proj", o="o_proj")
GPT2 = Fused(qkv="c_attn", o="c_proj")
NEOX = Fused(qkv="query_key_value", o="dense", interleaved=True)
MPT = Fused(qkv="Wqkv", o="out_proj")
PHI3 = Fused(qkv="qkv_proj", o="o_proj")
TIMM = Fused(qkv="qkv", o="proj")
TORCH = Fused(qkv="in_proj_weight", o="out_proj")
TORCH_APART = Separate(
    q="q_proj_weight", k="k_proj_weight", v="v_proj_weight", o="out_proj"
)

PRE = Block(feedforward=("mlp",), placement="pre")
SANDWICH = Block(feedforward=("mlp",), placement="sandwich")
ROUTED = Block(
    feedforward=("mlp|block_sparse_moe",),
    placement="pre",
    router="mlp.gate|mlp.router|block_sparse_moe.gate",
)
OUTSIDE_MLP = Block(feedforward=("fc1", "fc2"), placement=_norm_first)
AFTERWARDS = Block(feedforward=("fc1", "fc2"), placement="post")
BERT_LAYER = Block(feedforward=("intermediate", "output"), placement="post")
OLD_VIT = Block(feedforward=("intermediate", "output"), placement="pre")
T5_BLOCK = Block(
    feedforward=("layer.2.DenseReluDense|layer.1.DenseReluDense",), placement="pre"
)
TORCH_LAYER = Block(feedforward=("linear1", "linear2"), placement=_norm_first)
LAB_BLOCK = Block(feedforward=("feedforward",), placement=_residual)
LAB_ROUTED = Block(
    feedforward=("feedforward",), placement=_residual, router="feedforward.router"
)

# Class names without their ending, so that a family is one line.
_ATTENTION: tuple[tuple[Declaration, str, str], ...] = (
    (LLAMA, "Attention", "Llama Mistral Mixtral Qwen2 Qwen2Moe Qwen3 Qwen3Moe Gemma"),
    (
        LLAMA,
        "Attention",
        "Gemma2 Gemma3 GptOss Cohere Cohere2 Olmo Olmo2 Olmo3 Granite",
    ),
    (
        LLAMA,
        "Attention",
        "SmolLM3 StableLm Starcoder2 Ministral Helium Glm Glm4 ViT DeiT",
    ),
    (OPT, "Attention", "OPT CLIP Whisper Bart MBart Pegasus Marian M2M100 Siglip"),
    (OPT, "Attention", "Wav2Vec2 Hubert Blenderbot Speech2Text GPTJ"),
    (BERT, "SelfAttention", "Bert Roberta XLMRoberta Electra Camembert ViT DeiT"),
    (BERT, "CrossAttention", "Bert Roberta XLMRoberta Electra Camembert"),
    (BERT, "SdpaSelfAttention", "Bert Roberta XLMRoberta Camembert ViT DeiT"),
    (DISTILBERT, "", "DistilBertSelfAttention MultiHeadSelfAttention"),
    (DISTILBERT, "", "DistilBertSdpaAttention"),
    (ALBERT, "Attention", "Albert AlbertSdpa"),
    (T5, "Attention", "T5 MT5 UMT5 LongT5 Pop2Piano SwitchTransformers"),
    (GPT2, "", "GPT2Attention CausalSelfAttention"),
    (NEOX, "Attention", "GPTNeoX Bloom Falcon"),
    (MPT, "Attention", "Mpt"),
    (PHI3, "Attention", "Phi3"),
    (TIMM, "", "Attention"),
    (LAB, "", "SelfAttention"),
    (TORCH, "", "MultiheadAttention"),
    (TORCH_APART, "", "MultiheadAttention"),
)
_BLOCKS: tuple[tuple[Declaration, str, str], ...] = (
    (PRE, "DecoderLayer", "Llama Mistral Qwen2 Qwen3 Gemma Olmo Granite SmolLM3"),
    (PRE, "DecoderLayer", "StableLm Starcoder2 Ministral Helium Phi3"),
    (PRE, "", "GPT2Block GPTNeoXLayer CLIPEncoderLayer SiglipEncoderLayer"),
    (PRE, "", "ViTLayer DeiTLayer Block"),
    (SANDWICH, "DecoderLayer", "Gemma2 Gemma3"),
    (ROUTED, "DecoderLayer", "Mixtral GptOss Qwen2Moe Qwen3Moe"),
    (OUTSIDE_MLP, "", "OPTDecoderLayer WhisperEncoderLayer WhisperDecoderLayer"),
    (AFTERWARDS, "", "BartEncoderLayer BartDecoderLayer MarianEncoderLayer"),
    (AFTERWARDS, "", "MarianDecoderLayer"),
    (BERT_LAYER, "Layer", "Bert Roberta XLMRoberta Electra Camembert"),
    (OLD_VIT, "Layer", "ViT DeiT"),
    (Block(feedforward=("ffn",), placement="post"), "", "TransformerBlock"),
    (Block(feedforward=("ffn", "ffn_output"), placement="post"), "", "AlbertLayer"),
    (T5_BLOCK, "Block", "T5 MT5 UMT5"),
    (TORCH_LAYER, "", "TransformerEncoderLayer TransformerDecoderLayer"),
    (LAB_ROUTED, "", "Block"),
    (LAB_BLOCK, "", "Block"),
)


def fill(families: dict[str, list[Declaration]]) -> None:
    """Write the tables into the registry, in order: the first that fits is taken."""
    for declaration, ending, names in (*_ATTENTION, *_BLOCKS):
        for name in names.split():
            families.setdefault(f"{name}{ending}", []).append(declaration)
