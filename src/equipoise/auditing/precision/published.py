"""The two published indicators on a real model, block by block.

Axes, in this file: B batch · N tokens · C channel · H head · d head width.

They need to know which module is which: ``BlockNames`` says it once per architecture.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS, Format
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Where things are inside a block, as in ``block.named_modules()``."""

    q: str
    k: str
    v: str
    out: str
    up: str
    down: str
    attention_norm: str
    feedforward_norm: str
    heads: int
    causal: bool
    final: str = ""
    """The model's last norm; the model's own output when empty."""
    pre: bool = True
    """Branches read a normalised copy of the stream (pre-LN)."""


def lab_names(*, heads: int, causal: bool = True) -> BlockNames:
    """Return the names of the lab's own blocks."""
    return BlockNames(
        q="attention.q_proj",
        k="attention.k_proj",
        v="attention.v_proj",
        out="attention.o_proj",
        up="feedforward.up_proj",
        down="feedforward.down_proj",
        attention_norm="attention_norm",
        feedforward_norm="feedforward_norm",
        heads=heads,
        causal=causal,
        final="final_norm",
    )


def bert_names(*, heads: int) -> BlockNames:
    """Return the names of a Hugging Face BERT layer."""
    return BlockNames(
        q="attention.self.query",
        k="attention.self.key",
        v="attention.self.value",
        out="attention.output.dense",
        up="intermediate.dense",
        down="output.dense",
        attention_norm="attention.output.LayerNorm",
        feedforward_norm="output.LayerNorm",
        heads=heads,
        causal=False,
        pre=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBlocks:
    """Both papers' numbers for each block of a model."""

    v1: list[v1.BlockV1]
    v2: list[v2.BlockV2]
    final_norm: float
    """‖ln_f(x_L)‖, what v2's risks are relative to."""

    def v1_prediction(self, format: Format) -> float:
        return v1.predicted_error(self.v1, format)

    @property
    def v2_risks(self) -> list[float]:
        return v2.risks(self.v2, final_norm=self.final_norm)

    def v2_prediction(self, format: Format) -> float:
        return format.unit_roundoff * sum(self.v2_risks)


def published_blocks(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: list[nn.Module],
    names: BlockNames,
    seed: int = 0,
    risks_only: bool = False,
) -> PublishedBlocks:
    """Return v1's predictor and v2's risk terms of every block, from one forward pass.

    ``risks_only`` leaves v1 out: its condition numbers cost a full SVD per head.

    ρ_LN of v2 is for fp16, the format of its experiments. No padding is assumed.
    """
    rng = torch.Generator().manual_seed(seed)
    last = [_last(model, names.final)] if names.final else []
    with torch.no_grad(), _recorded([*blocks, *last]) as seen:
        y = output_of(model, batch)
    found = [_Block(block, names, seen) for block in blocks]
    return PublishedBlocks(
        v1=[] if risks_only else [block.v1(rng) for block in found],
        v2=[block.v2() for block in found],
        final_norm=float((seen[last[0]][1] if last else y).norm()),
    )


def _last(model: nn.Module, name: str) -> nn.Module:
    found: nn.Module | None = dict(model.named_modules()).get(name)
    if found is None:
        raise InputError(f"the model has no last norm called {name!r}")
    return found


Seen = dict[nn.Module, tuple[Tensor, Tensor]]


@contextmanager
def _recorded(blocks: list[nn.Module]) -> Iterator[Seen]:
    seen: Seen = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            seen[module] = (args[0].detach().float(), output.detach().float())

    with ExitStack() as exits:
        for block in blocks:
            for module in block.modules():
                exits.callback(module.register_forward_hook(note).remove)
        yield seen


@dataclass(slots=True)
class _Block:
    block: nn.Module
    names: BlockNames
    seen: Seen

    def module(self, role: str) -> nn.Module:
        name: str = getattr(self.names, role)
        found: nn.Module | None = dict(self.block.named_modules()).get(name)
        if found is None or found not in self.seen:
            raise InputError(f"the block has no module {name!r} that ran")
        return found

    def passed(self, role: str) -> tuple[Tensor, Tensor]:
        return self.seen[self.module(role)]

    def weight(self, role: str) -> Tensor:
        weight = self.module(role).weight
        assert isinstance(weight, Tensor)
        return weight.detach().float()

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._heads(self.passed(role)[1]) for role in "qkv")
        return q, k, v

    def _heads(self, x_BNC: Tensor) -> Tensor:
        x_BNHd: Tensor = x_BNC.unflatten(-1, (self.names.heads, -1))
        return x_BNHd.transpose(1, 2)

    @property
    def visible(self) -> Tensor | None:
        N = self.passed("q")[1].shape[1]
        return torch.ones(N, N, dtype=torch.bool).tril() if self.names.causal else None

    @property
    def streams(self) -> tuple[Tensor, Tensor]:
        """Return the residual stream before attention, and before the MLP."""
        before = ("attention_norm", "feedforward_norm")
        first, second = before if self.names.pre else ("q", "up")
        return self.passed(first)[0], self.passed(second)[0]

    def norm(self, role: str) -> tuple[Tensor, float]:
        eps = getattr(self.module(role), "eps", 1e-5)
        return self.passed(role)[0], float(eps)

    def v1(self, rng: torch.Generator) -> v1.BlockV1:
        q, k, v = self.qkv
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if self.visible is not None:
            s = s.masked_fill(~self.visible, -math.inf)
        weights = [self.weight(role) for role in ("up", "down", "out")]
        norms = [self.norm(role) for role in ("attention_norm", "feedforward_norm")]
        return v1.BlockV1(
            kappa_softmax=float(v1.kappa_softmax(s, generator=rng)),
            kappa_score=float(v1.kappa_score(q, k, generator=rng)),
            kappa_value=float(v1.kappa_value(v, generator=rng)),
            output_norm=float(torch.linalg.matrix_norm(weights[2], ord=2)),
            kappa_eff=float(v1.kappa_eff(*weights)),
            c_ln=max(float(v1.c_ln(x, eps=eps)) for x, eps in norms),
        )

    def v2(self) -> v2.BlockV2:
        norms = [self.norm(role) for role in ("attention_norm", "feedforward_norm")]
        gains = [self.weight(r) for r in ("attention_norm", "feedforward_norm")]
        remainder = sum(
            float(torch.linalg.matrix_norm(self.weight(role), ord=2))
            * float(self.passed(role)[0].norm())
            for role in ("out", "up", "down")
        )
        streams = [float(x.norm()) for x in self.streams]
        branches = [float(self.passed(role)[1].norm()) for role in ("out", "down")]
        return v2.BlockV2(
            attention=float(
                v2.attention_v2(self.qkv, visible_NK=self.visible).magnitude
            ),
            layernorm=sum(
                v2.layernorm_magnitude(x, eps=eps, gain=gain)
                for (x, eps), gain in zip(norms, gains, strict=True)
            ),
            remainder=remainder,
            transport=v2.transport_surrogate(
                (branches[0], streams[0]), (branches[1], streams[1])
            ),
            rho_ln=max(
                v2.rho_ln(x, eps=eps, format=FORMATS["fp16"]) for x, eps in norms
            ),
        )
