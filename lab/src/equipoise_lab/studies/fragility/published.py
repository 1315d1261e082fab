"""The two published indicators on a real model, block by block.

Axes, in this file: B batch · N tokens · C channel · H head · d head width.

Which module is which is read from the model's anatomy: the papers know blocks of
attention with four maps of their own, a feed-forward net and two norms.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import Anatomy
from equipoise.auditing.subject import Batch, output_of
from equipoise.errors import InputError
from equipoise.numerics.formats import FORMATS, Format
from equipoise.theory import baek_v1 as v1
from equipoise.theory import baek_v2 as v2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """The modules of a block that the papers name, by their parts in it."""

    name: str
    heads: int
    modules: dict[str, nn.Module]
    """q, k, v, out, up, down, attention_norm, feedforward_norm."""
    norms: tuple[str, str]
    """Names of the two norms in the model."""
    pre: bool
    """Branches read a normalised copy of the stream (pre-LN)."""


def block_parts(anatomy: Anatomy) -> list[BlockParts]:
    """Return the parts of every block of a model, first to last."""
    found = [_parts(anatomy, name) for name in anatomy.blocks]
    if not found:
        raise InputError(f"{type(anatomy.model).__name__} has no blocks we know")
    return found


def _parts(anatomy: Anatomy, block: str) -> BlockParts:
    inside = f"{block}."
    sites = [s for s in anatomy.attention if f"{s.name}.".startswith(inside)]
    maps = sites[0].projections if len(sites) == 1 else None
    if maps is None or any(w.rows is not None for w in (maps.q, maps.k, maps.v)):
        raise InputError(f"{block} has no attention with four maps of its own")
    norms = [
        name
        for name in anatomy.norms
        if name.startswith(inside) and not name.startswith(f"{sites[0].name}.")
    ]
    linear = [
        module
        for name, feedforward in anatomy.feedforwards.items()
        if name.startswith(inside)
        for module in feedforward.modules()
        if isinstance(module, nn.Linear)
    ]
    if len(norms) != 2 or len(linear) < 2:
        raise InputError(
            f"{block} has {len(norms)} norms and {len(linear)} feed-forward maps: the "
            "papers know blocks with two norms and two maps"
        )
    return BlockParts(
        name=block,
        heads=maps.heads,
        modules={
            **{letter: getattr(maps, letter).module for letter in "qkv"},
            "out": maps.o.module,
            "up": linear[-2],
            "down": linear[-1],
            "attention_norm": anatomy.norms[norms[0]],
            "feedforward_norm": anatomy.norms[norms[1]],
        },
        norms=(norms[0], norms[1]),
        pre=anatomy.placement == "pre",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBlocks:
    """Both papers' numbers for each block of a model."""

    v1: list[v1.BlockV1]
    v2: list[v2.BlockV2]
    parts: list[BlockParts]
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
    model: nn.Module, batch: Batch, *, risks_only: bool = False
) -> PublishedBlocks:
    """Return v1's predictor and v2's risk terms of every block, from one forward pass.

    ``risks_only`` leaves v1 out: its condition numbers cost a full SVD per head.

    ρ_LN of v2 is for fp16, the format of its experiments. No padding is assumed.
    """
    rng = torch.Generator().manual_seed(0)
    anatomy = anatomy_of(model)
    parts, last = block_parts(anatomy), _last_norm(anatomy)
    causal: list[bool] = []
    with (
        torch.no_grad(),
        _recorded([*anatomy.blocks.values(), *last]) as seen,
        Interceptor(anatomy, lambda call: causal.append(_is_causal(call))),
    ):
        y = output_of(model, batch)
    found = [_Block(part, seen, all(causal)) for part in parts]
    return PublishedBlocks(
        v1=[] if risks_only else [block.v1(rng) for block in found],
        v2=[block.v2() for block in found],
        parts=parts,
        final_norm=float((seen[last[0]][1] if last else y).norm()),
    )


def _last_norm(anatomy: Anatomy) -> list[nn.Module]:
    """Return the norm behind the last block, which only pre-LN networks have."""
    outside = [
        norm
        for name, norm in anatomy.norms.items()
        if not any(name.startswith(f"{block}.") for block in anatomy.blocks)
    ]
    return outside[-1:] if anatomy.placement == "pre" else []


def _is_causal(call: AttentionCall) -> bool:
    """Return whether the first query sees no key but the first."""
    first = call.scores(slice(0, 1))
    return not bool((first[..., 1:] > -math.inf).any())


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
                exits.callback(hooks.after(module, note).remove)
        yield seen


@dataclass(slots=True)
class _Block:
    parts: BlockParts
    seen: Seen
    causal: bool

    def module(self, role: str) -> nn.Module:
        module = self.parts.modules[role]
        if module not in self.seen:
            raise InputError(f"{role} of {self.parts.name} did not run on this batch")
        return module

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
        x_BNHd: Tensor = x_BNC.unflatten(-1, (self.parts.heads, -1))
        return x_BNHd.transpose(1, 2)

    @property
    def visible(self) -> Tensor | None:
        N = self.passed("q")[1].shape[1]
        return torch.ones(N, N, dtype=torch.bool).tril() if self.causal else None

    @property
    def streams(self) -> tuple[Tensor, Tensor]:
        """Return the residual stream before attention, and before the MLP."""
        before = ("attention_norm", "feedforward_norm")
        first, second = before if self.parts.pre else ("q", "up")
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
