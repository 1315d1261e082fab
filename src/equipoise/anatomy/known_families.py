"""The families we know: Hugging Face, timm, nanoGPT, torch.nn and our own lab."""

from torch import nn

from equipoise.anatomy.families import Block, Declaration, Fused, Paired, Separate
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
GPT2_CROSS = Paired(q="q_attn", kv="c_attn", o="c_proj")
MODERNBERT = Fused(qkv="Wqkv", o="Wo")
DEBERTA = Fused(qkv="in_proj", o="..output.dense", interleaved=True)
DEBERTA_V2 = Separate(q="query_proj", k="key_proj", v="value_proj", o="..output.dense")
BLIP = Fused(qkv="qkv", o="projection")
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

LATER = "Llama4TextDecoderLayer Lfm2DecoderLayer BambaDecoderLayer"
SPEECH = "Wav2Vec2EncoderLayer HubertEncoderLayer"

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
    (LLAMA, "Attention", "Olmoe GraniteMoe Llama4Text Nemotron Exaone4 Arcee"),
    (LLAMA, "Attention", "Ernie4_5 SeedOss BitNet Phimoe Jamba Bamba Dinov2 Beit"),
    (LLAMA, "Attention", "Swin Segformer ViTMAE"),
    (OPT, "Attention", "OPT CLIP Whisper Bart MBart Pegasus Marian M2M100 Siglip"),
    (OPT, "Attention", "Wav2Vec2 Hubert Blenderbot Speech2Text GPTJ BioGpt XGLM"),
    (OPT, "", "LEDDecoderAttention Lfm2Attention"),
    (BERT, "SelfAttention", "Bert Roberta XLMRoberta Electra Camembert ViT DeiT"),
    (BERT, "SelfAttention", "Ernie Esm LayoutLM Data2VecText IBert RoFormer BigBird"),
    (BERT, "SelfAttention", "BlipText Yolos MobileViT"),
    (BERT, "CrossAttention", "Bert Roberta XLMRoberta Electra Camembert"),
    (BERT, "SdpaSelfAttention", "Bert Roberta XLMRoberta Camembert ViT DeiT"),
    (DISTILBERT, "", "DistilBertSelfAttention MultiHeadSelfAttention"),
    (DISTILBERT, "", "DistilBertSdpaAttention"),
    (ALBERT, "Attention", "Albert AlbertSdpa"),
    (T5, "", "MPNetSelfAttention"),
    (DEBERTA, "", "DisentangledSelfAttention"),
    (DEBERTA_V2, "", "DisentangledSelfAttention"),
    (MODERNBERT, "", "ModernBertAttention"),
    (BLIP, "", "BlipAttention"),
    (T5, "Attention", "T5 MT5 UMT5 LongT5 Pop2Piano SwitchTransformers"),
    (GPT2_CROSS, "", "GPT2Attention"),
    (GPT2, "", "GPT2Attention CausalSelfAttention GPTBigCodeAttention"),
    (NEOX, "Attention", "GPTNeoX Bloom Falcon Persimmon"),
    (MPT, "Attention", "Mpt"),
    (PHI3, "Attention", "Phi3"),
    (TIMM, "", "Attention"),
    (LAB, "", "SelfAttention"),
    (TORCH, "", "MultiheadAttention"),
    (TORCH_APART, "", "MultiheadAttention"),
)
_BLOCKS: tuple[tuple[Declaration, str, str], ...] = (
    (PRE, "DecoderLayer", "Llama Mistral Qwen2 Qwen3 Gemma Olmo Granite SmolLM3"),
    (PRE, "DecoderLayer", "StableLm Starcoder2 Ministral Helium Phi3 Nemotron Arcee"),
    (PRE, "DecoderLayer", "Cohere Cohere2 Ernie4_5 SeedOss BitNet DeepseekV2"),
    (PRE, "DecoderLayer", "DeepseekV3 Persimmon"),
    (PRE, "", "GPTBigCodeBlock ModernBertEncoderLayer Dinov2Layer BeitLayer"),
    (PRE, "", "ViTMAELayer BlipEncoderLayer"),
    (PRE, "", "GPT2Block GPTNeoXLayer CLIPEncoderLayer SiglipEncoderLayer"),
    (PRE, "", "ViTLayer DeiTLayer Block"),
    (SANDWICH, "DecoderLayer", "Gemma2 Gemma3 Glm4"),
    (ROUTED, "DecoderLayer", "Mixtral GptOss Qwen2Moe Qwen3Moe Olmoe Phimoe"),
    (Block(feedforward=("ffn",), placement="pre"), "", "MptBlock"),
    (Block(feedforward=("feed_forward",), placement="pre"), "", LATER),
    (Block(feedforward=("feed_forward",), placement="post"), "", SPEECH),
    (OUTSIDE_MLP, "", "OPTDecoderLayer WhisperEncoderLayer WhisperDecoderLayer"),
    (OUTSIDE_MLP, "EncoderLayer", "Pegasus MBart M2M100 Blenderbot"),
    (OUTSIDE_MLP, "DecoderLayer", "Pegasus MBart M2M100 Blenderbot BioGpt XGLM"),
    (AFTERWARDS, "", "BartEncoderLayer BartDecoderLayer MarianEncoderLayer"),
    (AFTERWARDS, "", "MarianDecoderLayer"),
    (BERT_LAYER, "Layer", "Bert Roberta XLMRoberta Electra Camembert Ernie LayoutLM"),
    (BERT_LAYER, "Layer", "Data2VecText RoFormer BigBird Longformer BlipText MPNet"),
    (BERT_LAYER, "Layer", "Deberta DebertaV2 IBert"),
    (OLD_VIT, "Layer", "ViT DeiT Yolos MobileViTTransformer Esm"),
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
