"""Classes that are not of ``transformers``: torch's, those of speed runs, lucidrains'.

x-transformers is looked at where it is installed (``pip install --no-deps
x-transformers einx frozendict loguru torch-einops-utils``); nothing here needs it.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.constructed.speedruns import NanochatLike, SpeedrunLike
from tests.zoo.constructed.subjects import DECODED, Batch, Subject
from tests.zoo.specimens import tokens

WIDTH, HEADS, VOCABULARY = 32, 4, 64


def others() -> dict[str, Subject]:
    """Return every subject that no mapping of ``transformers`` lists, by name."""
    found = {**_torchs(), **_speedruns()}
    return found | (_lucidrains() if find_spec("x_transformers") else {})


def _seeded(make: Callable[[str], nn.Module], implementation: str) -> nn.Module:
    """In training mode: in evaluation torch's stacks write no softmax down."""
    torch.manual_seed(0)
    return make(implementation)


def _subject(
    name: str,
    kind: str,
    make: Callable[[str], nn.Module],
    batch: Callable[[nn.Module], Batch],
) -> Subject:
    return Subject(name=name, kind=kind, build=partial(_seeded, make), batch=batch)


def _ids(model: nn.Module) -> Batch:
    return {"input_ids": tokens()["input_ids"]}


class Stack(nn.Module):
    """One of torch's stacks between an embedding and a head."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.embed, self.stack = nn.Embedding(VOCABULARY, WIDTH), stack
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        if isinstance(self.stack, nn.TransformerEncoder):
            return self.head(self.stack(x))
        if isinstance(self.stack, nn.MultiheadAttention):
            return self.head(x + self.stack(x, x, x, need_weights=False)[0])
        mask = nn.Transformer.generate_square_subsequent_mask(DECODED, dtype=x.dtype)
        return self.head(self.stack(x[:, :DECODED], x, tgt_mask=mask))


class Pair(nn.Module):
    """``nn.Transformer``, its encoder beside its decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 64)
        sizes = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True}
        self.stack = nn.Transformer(WIDTH, HEADS, 2, 2, **sizes)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(DECODED, dtype=x.dtype)
        out: Tensor = self.head(self.stack(x, x[:, :DECODED], tgt_mask=mask))
        return out


def _layer(kind: type[nn.Module], *, norm_first: bool) -> Any:
    sizes = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    return kind(WIDTH, HEADS, 48, **sizes)


def _torchs() -> dict[str, Subject]:
    def encoder(_: str, *, norm_first: bool) -> nn.Module:
        layer = _layer(nn.TransformerEncoderLayer, norm_first=norm_first)
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        return Stack(stack)

    def decoder(_: str, *, norm_first: bool) -> nn.Module:
        layer = _layer(nn.TransformerDecoderLayer, norm_first=norm_first)
        return Stack(nn.TransformerDecoder(layer, 2))

    makes: dict[str, Callable[[str], nn.Module]] = {
        "nn.MultiheadAttention": lambda _: Stack(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)  # without dropout
        ),
        "nn.TransformerEncoder": partial(encoder, norm_first=False),
        "nn.TransformerEncoder, norm first": partial(encoder, norm_first=True),
        "nn.TransformerDecoder": partial(decoder, norm_first=False),
        "nn.TransformerDecoder, norm first": partial(decoder, norm_first=True),
        "nn.Transformer": lambda _: Pair(),
    }
    return {n: _subject(n, "torch", make, _ids) for n, make in makes.items()}


def _speedruns() -> dict[str, Subject]:
    kinds = {"nanochat-like": NanochatLike, "modded-nanogpt-like": SpeedrunLike}
    return {
        name: _subject(name, "ours", lambda _, kind=kind: kind(), _ids)
        for name, kind in kinds.items()
    }


# What each is built with beside its width, depth and heads.
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, QK-norm": {"rotary_pos_emb": True, "attn_qk_norm": True},
    "grouped": {"attn_kv_heads": 2},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": HEADS},
    "T5 bias": {"rel_pos_bias": True},
    "memories": {"attn_num_mem_kv": 3},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "gated values": {"attn_gate_values": True},
    "sparse top-k": {"attn_sparse_topk": 3},
    "soft cap": {"softclamp_output": True, "attn_softclamp_logits": True},
    "RMSNorm, sandwich": {"use_rmsnorm": True, "sandwich_norm": True},
    "macaron, ReLU²": {"macaron": True, "ff_relu_squared": True},
    "hyper-connections": {"num_residual_streams": 2},
}


def _lucidrains() -> dict[str, Subject]:
    import x_transformers as x

    sizes = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8}

    def decoder(how: str, options: dict[str, Any]) -> nn.Module:
        fused = {"attn_flash": how == "sdpa"}
        layers = x.Decoder(**sizes, **fused, **options)
        return x.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers)

    def encoder(how: str) -> nn.Module:
        layers = x.Encoder(**sizes, attn_flash=how == "sdpa")
        return x.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers)

    made = {
        f"Decoder, {name}": partial(decoder, options=options)
        for name, options in DECODERS.items()
    }
    every = {**made, "Encoder": encoder}
    ids = lambda _: {"x": tokens()["input_ids"]}  # noqa: E731
    return {
        f"x-transformers {name}": _subject(
            f"x-transformers {name}", "x-transformers", m, ids
        )
        for name, m in every.items()
    }
