"""What sealed cases share: models of other people's classes, tasks, and a plain loop.

Axes, in this file:  B batch · T token · C channel · V vocabulary · N class.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise_lab.mistakes.case import STEPS, Attach
from equipoise_lab.mistakes.material import (
    IGNORED,
    LENGTH,
    ROWS,
    VOCABULARY,
    Decoder,
    batches,
    next_token_loss,
    text,
)

__all__ = [
    "IGNORED",
    "LENGTH",
    "ROWS",
    "STEPS",
    "VOCABULARY",
    "Attach",
    "Decoder",
    "batches",
    "next_token_loss",
    "text",
]
MASK, PAD, EOS, BOS = 31, 0, 1, 2
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# No id of a special token lies outside of the small vocabulary.
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def gpt2(*, dropout: float = 0.0, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {f"{where}_pdrop": dropout for where in ("resid", "embd", "attn")}
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=VOCABULARY, **sizes, **drops, **IDS, **changes)
    return GPT2LMHeadModel(config)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **IDS, **changes}))


def qwen(**changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **IDS, **changes}))


def gemma(**changes: Any) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16}
    return Gemma2ForCausalLM(Gemma2Config(**{**sizes, **IDS, **changes}))


def mixtral(**changes: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **IDS, **changes}))


def deepseek(**changes: Any) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    config = DeepseekV3Config(**{**SMALL, **IDS, **sizes, **changes})
    return DeepseekV3ForCausalLM(config)


def bert_config(*, dropout: float = 0.0, **changes: Any) -> Any:
    from transformers import BertConfig

    drops = {
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return BertConfig(**{**SMALL, **drops, "pad_token_id": PAD, **changes})


def bert(**changes: Any) -> Any:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(bert_config(**changes))


def t5(**changes: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    starts = {"decoder_start_token_id": PAD, "dropout_rate": 0.0}
    ids = {"pad_token_id": PAD, "eos_token_id": EOS}
    config = T5Config(**{"vocab_size": VOCABULARY, **sizes, **starts, **ids, **changes})
    return T5ForConditionalGeneration(config)


def bart(**changes: Any) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }
    config = BartConfig(**{"vocab_size": VOCABULARY, **sizes, **IDS, **changes})
    return BartForConditionalGeneration(config)


def vit(classes: int = 4, **changes: Any) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 1,
        "num_labels": classes,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ViTForImageClassification(ViTConfig(**{**sizes, **changes}))


def pictures(
    seed: int, rows: int = 16, *, classes: int = 4, size: int = 16
) -> tuple[Tensor, Tensor]:
    """Return noisy images with a bright band, and which band it is."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (rows,), generator=rng)
    x = 0.5 * torch.randn(rows, 1, size, size, generator=rng)
    height = size // classes
    for row, at in enumerate(y.tolist()):
        x[row, :, height * at : height * (at + 1)] += 1.5
    return x, y


def labelled(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Return text, and whether its first token is the smaller of its first two."""
    ids = text(rows, seed=seed)
    return ids, (ids[:, 0] < ids[:, 1]).long()


def padded(seed: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return ids with padding at one end, and which tokens are real."""
    ids = text(seed=seed).clamp(min=3)
    rng = torch.Generator().manual_seed(seed)
    ends = torch.randint(10, LENGTH - 2, (len(ids),), generator=rng)
    real = torch.arange(LENGTH) < ends[:, None]
    if left:
        real = real.flip(1)
    return ids.masked_fill(~real, PAD), real


def corrupted(
    seed: int, share: float = 0.25, *, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return text with masked tokens, and labels that count at those only."""
    ids = text(seed=seed).clamp(max=MASK - 1)
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.rand(ids.shape, generator=rng) < share
    if among is not None:
        hidden &= among
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED)


def elsewhere(count: int = STEPS) -> Iterator[Tensor]:
    """Yield text of another source than the one that :func:`learnt` has seen."""
    return ((ids + 7) % VOCABULARY for ids in batches(count))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of labels that stand where their logits stand."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss that a model of transformers computes from its own inputs."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return next_token_loss(model(ids), ids)


def train(
    model: nn.Module,
    watch: Attach,
    loss: Callable[[nn.Module, Any], Tensor] = own_loss,
    *,
    data: Iterable[Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 3e-3,
) -> None:
    """Train as the tutorials do, with AdamW unless an optimiser is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    watch(model, optimizer)
    for batch in batches(STEPS) if data is None else data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def every(make: Callable[[int], Any], count: int = STEPS) -> Iterator[Any]:
    """Yield the batch of each step, made from its number."""
    for step in range(count):
        yield make(step)


def learnt(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor] = own_loss,
    *,
    data: Iterable[Any] | None = None,
    steps: int = 60,
) -> nn.Module:
    """Train a model before its program begins, as a checkpoint would have been."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in batches(steps, seed=3) if data is None else data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model
