"""Tensor parallelism for two ranks: ways to split a model, and what one process has."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from tests.watching.models import TOKENS

TINY_MODEL = {
    **{f"attention.{letter}_proj": ColwiseParallel for letter in "qkv"},
    "attention.o_proj": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}
LLAMA = {
    **{f"self_attn.{letter}_proj": ColwiseParallel for letter in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    **{f"mlp.{name}_proj": ColwiseParallel for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel,
}


def split_tiny_model(model: Any) -> nn.Module:
    """The rest stays plain: tensors that every rank holds."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(
            block, mesh, {name: way() for name, way in TINY_MODEL.items()}
        )
    return model  # type: ignore[no-any-return]


def split_llama(model: Any) -> nn.Module:
    """Everything is a DTensor, so that clipping sees one kind; 11 tokens split 6:5."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.inner.model.layers:
        parallelize_module(block, mesh, {name: way() for name, way in LLAMA.items()})
    parallelize_module(
        model.inner,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
            "model.norm": Whole(),
            "model.layers.*.input_layernorm": Whole(),
            "model.layers.*.post_attention_layernorm": Whole(),
        },
    )
    return model  # type: ignore[no-any-return]


class Whole(ParallelStyle):
    """Every rank holds the module, as DTensors; tensors go in and out as they are."""

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        def enter(module: nn.Module, args: Any, mesh: Any) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in args)

        def leave(module: nn.Module, output: Any, mesh: Any) -> Any:
            return output.to_local()

        return distribute_module(module, mesh, None, enter, leave)


class Llama(nn.Module):
    """Grouped queries and rotated keys: two key heads serve four query heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
            bos_token_id=0, eos_token_id=0, initializer_range=0.2,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens).logits
        return logits
