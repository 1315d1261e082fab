"""Families of models: how a class is declared, and the classes we know.

A declaration adds what interception cannot see: which weights are the projections, and
how a block is put together. It is found by class name. Paths are relative to the
module; ``..`` is its parent, and ``a|b`` is a where it exists and b otherwise. A
declaration whose paths a module does not have is not about that module.

Known are classes of Hugging Face, timm, nanoGPT, torch.nn and our own lab.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Literal, get_args

from torch import nn

from equipoise.anatomy.sites import Placement
from equipoise.errors import InputError

log = logging.getLogger("equipoise")

GROUP = "equipoise.families"
Weights = Literal["softmax", "sigmoid", "relu2", "sparsemax"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """Attention with four maps of their own: modules, or parameters."""

    q: str
    k: str
    v: str
    o: str
    gated: bool = False
    """True where q's rows go head by head, the query and then a gate for the output."""
    weights: Weights = "softmax"
    """What makes weights of scores; only a softmax is recognised without being told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Attention with one map for q, k and v: its rows are q, then k, then v."""

    qkv: str
    o: str
    interleaved: bool = False
    """True where the rows go group by group: a group's queries, its key, its value."""
    weights: Weights = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Attention with one map for k and v, k's rows first, and one of its own for q."""

    q: str
    kv: str
    o: str
    weights: Weights = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of the residual stream, and what is in it."""

    feedforward: tuple[str, ...]
    """One module, or its parts where the block holds them itself."""
    placement: Placement | Callable[[nn.Module], Placement] = ""
    """Where the norms are; a function where the module itself tells."""
    router: str = ""
    """Its output, or the first of its outputs, is the logits over experts."""


Layout = Separate | Fused | Paired
Declaration = Separate | Fused | Paired | Block

FAMILIES: dict[str, list[Declaration]] = {}


def family(*class_names: str) -> Callable[[Callable[[], Declaration]], None]:
    """Declare a family from outside; the latest declaration is tried first.

    Example:
        >>> @family("MyAttention")
        ... def mine():
        ...     return Separate(q="wq", k="wk", v="wv", o="wo")
        >>> FAMILIES.pop("MyAttention")[0].q
        'wq'
    """

    def declare(table: Callable[[], Declaration]) -> None:
        declaration = table()
        if not isinstance(declaration, Declaration):
            raise InputError(
                f"the family of {', '.join(class_names)} is {declaration!r}: return "
                f"one of Separate, Fused, Paired or Block. {advice(class_names[0])}"
            )
        weights = getattr(declaration, "weights", "softmax")
        if weights not in get_args(Weights):
            raise InputError(
                f"the family of {', '.join(class_names)} has weights={weights!r}: "
                f"choose one of {', '.join(get_args(Weights))}"
            )
        for name in class_names:
            FAMILIES.setdefault(name, []).insert(0, declaration)

    return declare


def declared(class_name: str) -> list[Declaration]:
    """Return what is declared under a class name, installed packages included."""
    load_entry_points()
    return FAMILIES.get(class_name, [])


@cache
def load_entry_points() -> None:
    """Import what installed packages offer as ``equipoise.families``, once."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except (ImportError, AttributeError) as failure:
            log.warning("equipoise: family %s is not loaded: %s", point.name, failure)


def advice(class_name: str) -> str:
    """Return how to declare an unknown class, and which classes are known."""
    known = ", ".join(sorted(FAMILIES))
    return (
        f"To declare it write\n"
        f"    from equipoise.anatomy.families import Separate, family\n"
        f'    @family("{class_name}")\n'
        f'    def mine(): return Separate(q="…", k="…", v="…", o="…")\n'
        f"Known classes: {known}"
    )


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
GATED = Separate(q="q_proj", k="k_proj", v="v_proj", o="o_proj", gated=True)
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
    (GATED, "Attention", "Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText"),
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


# In order: the first that fits is taken.
for _declaration, _ending, _names in (*_ATTENTION, *_BLOCKS):
    for _name in _names.split():
        FAMILIES.setdefault(f"{_name}{_ending}", []).append(_declaration)
