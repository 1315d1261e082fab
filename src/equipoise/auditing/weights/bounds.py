"""Lipschitz bounds of attention and feed-forward nets, for tokens out of their norm.

Axes, in this file:  H head · D model width.

The block-∞ norm (the largest token, each in ℓ2). A norm's outputs lie in the ball
B = max|γ|·√D + ‖β‖₂. In it, with s the scale of q·k (Emadi's Theorem 5.1 with the
products of a head's maps, with biases, and θ ≤ 1):

    attention     Σ_h ‖W_V W_O‖·(1 + sB·(‖W_Q‖·k + q·‖W_K‖))
    feed-forward  ‖W_down‖·‖W_up‖·max|φ'|
    gated         ‖W_down‖·(max|φ'|·‖W_gate‖·u + g·‖W_up‖)

with q = ‖W_Q‖B + ‖b_Q‖, the longest query; k, u and g alike; |φ(z)| ≤ |z| where gated.
b_V drops out because the weights of a row sum to one. Rotations do not change lengths,
a soft-cap shortens, added biases and masks do not depend on tokens. Norms of maps are
upper ends of their intervals. What has no bound says why.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from equipoise.auditing.weights.blocks import (
    BLOCKS,
    BlockType,
    activation_of,
    refusal,
)
from equipoise.auditing.weights.entries import Checkpoint
from equipoise.auditing.weights.layout import AttentionLayout, config_for, tensor_at
from equipoise.theory.activations import activation_named

BELOW_IDENTITY = frozenset({"gelu", "gelu_tanh", "quick_gelu", "relu", "silu"})
"""|φ(z)| ≤ |z|."""
ROUNDING = 1 + 1e-5
"""Norms of products are roots of float64 eigenvalues of float32 maps."""
Uppers = Mapping[str, float]
"""Map → its spectral norm's upper end; infinite where nothing was proven."""


class Found(NamedTuple):
    """A bound, or the reason there is none."""

    value: float = math.nan
    reason: str = ""


class DescribedBlock(NamedTuple):
    """A block of a described type."""

    type: BlockType
    config: Mapping[str, Any]
    ball: "Ball"


def described(checkpoint: Checkpoint, name: str) -> BlockType | None:
    """Return how the model that a tensor or module is part of was described, if it was.

    GGUF files have names of their own, and γ as it is used.
    """
    if checkpoint.format == "gguf":
        return None
    return BLOCKS.get(str(config_for(checkpoint.config, name).get("model_type")))


def gain_offset(checkpoint: Checkpoint, norm: str) -> float:
    """Return the number a norm adds to its stored γ: seen when run, or declared."""
    seen = checkpoint.offsets.get(norm)
    if seen is not None:
        return seen
    block = described(checkpoint, norm)
    return 0.0 if block is None else block.offset


def radius(checkpoint: Checkpoint, norm: str, *, bare: int = 0) -> float:
    """Return max|γ|·√D + ‖β‖₂ of a norm; NaN where it is not there.

    ``bare`` is D of a norm without γ.
    """
    if bare:
        return math.sqrt(bare)
    weight = checkpoint.entries.get(f"{norm}.weight")
    if weight is None or len(weight.shape) != 1 or not weight.is_float:
        return math.nan
    gain_D = checkpoint.read(f"{norm}.weight").double() + gain_offset(checkpoint, norm)
    shift = _bias_norm(checkpoint, norm)
    return float(gain_D.abs().max()) * math.sqrt(weight.numel) + shift


def _bias_norm(checkpoint: Checkpoint, module: str) -> float:
    if f"{module}.bias" not in checkpoint.entries:
        return 0.0
    return float(torch.linalg.vector_norm(checkpoint.read(f"{module}.bias").double()))


def attention_bound(
    checkpoint: Checkpoint,
    attention: AttentionLayout,
    heads: Mapping[str, list[float]],
) -> Found:
    """Return the bound of one attention module from its heads' norms."""
    block = described(checkpoint, attention.site)
    if block is None:
        return Found(reason="unknown_type")
    config = config_for(checkpoint.config, attention.site)
    name = _stem(attention.site, block.attention)
    if name is None:
        return Found(reason="undescribed")
    if reason := refusal(block, config) or block.attention_without:
        return Found(reason=reason)
    needed = ("projection.vo", "weights.head.q", "weights.head.k")
    if attention.heads is None or not all(key in heads for key in needed):
        return Found(reason="heads")
    B = _radius(
        checkpoint, block, block.attention_norm, _ball(checkpoint, attention, name)
    )
    scale = abs(block.scale(config, int(heads["width"][0])))
    if not math.isfinite(B * scale):
        return Found(reason="norm")
    total = 0.0
    biases = [_head_biases(checkpoint, attention, letter) for letter in "qk"]
    rows = zip(*(heads[key] for key in needed), *biases, strict=True)
    for vo, q, k, shift_q, shift_k in rows:
        react = q * (k * B + shift_k) + (q * B + shift_q) * k
        total += vo * (1 + scale * B * react)
    return Found(total * ROUNDING)


class Ball(NamedTuple):
    """Which block's tokens, and their width."""

    block: str
    width: int


def _ball(checkpoint: Checkpoint, attention: AttentionLayout, block: str) -> Ball:
    rows, columns = checkpoint.entries[attention.q.tensor].shape
    return Ball(block, rows if attention.q.transposed else columns)


def _stem(site: str, paths: str) -> str | None:
    """Return the block a module is in, if it is at one of the paths in it."""
    for path in paths.split("|"):
        stem = site.removesuffix(f".{path}")
        if stem != site and stem.rpartition(".")[2].isdigit():
            return stem
    return None


def _radius(checkpoint: Checkpoint, block: BlockType, norm: str, ball: Ball) -> float:
    if block.bare:
        return radius(checkpoint, "", bare=ball.width)
    for path in _norms(norm, ball.block):
        entry = checkpoint.entries.get(f"{path}.weight")
        if entry is not None:
            fits = entry.numel == ball.width
            return radius(checkpoint, path) if fits else math.nan
    return math.nan


def _norms(norm: str, block: str) -> Iterator[str]:
    """Yield where the norm may be, the first that is there being the one."""
    stack, _, number = block.rpartition(".")
    if not norm.startswith("^"):
        yield from (f"{block}.{path}" for path in norm.split("|"))
        return
    previous, first = norm[1:].split("^^")
    if int(number):
        yield f"{stack}.{int(number) - 1}.{previous}"
        return
    while stack:
        stack = stack.rpartition(".")[0]
        yield f"{stack}.{first}".strip(".")


def _head_biases(
    checkpoint: Checkpoint, attention: AttentionLayout, letter: str
) -> list[float]:
    """Return ‖b‖ of every query head, or of the key head it reads."""
    part = getattr(attention, letter)
    heads, groups = attention.heads, attention.kv_heads
    assert heads is not None and groups is not None
    name = part.tensor.removesuffix(".weight") + ".bias"
    if part.tensor.endswith("in_proj_weight"):
        name = part.tensor.replace("in_proj_weight", "in_proj_bias")
    if name not in checkpoint.entries or name == part.tensor:
        return [0.0] * heads
    column = checkpoint.read(name).double()[:, None]
    own = (part.of(column.mT) if part.transposed else part.of(column)).flatten()
    by_head = own.unflatten(0, (heads if letter == "q" else groups, -1))
    shared = 1 if letter == "q" else heads // groups
    norms: list[float] = by_head.norm(dim=-1).repeat_interleave(shared).tolist()
    return norms


def feedforward_bounds(
    checkpoint: Checkpoint, sites: list[AttentionLayout], norms: Uppers
) -> Iterator[tuple[str, Found]]:
    """Yield block → bound of its feed-forward net, of blocks that hold attention."""
    seen = set()
    for attention in sites:
        block = described(checkpoint, attention.site)
        name = None if block is None else _stem(attention.site, block.attention)
        if block is None or name is None or name in seen:
            continue
        seen.add(name)
        config = config_for(checkpoint.config, attention.site)
        place = DescribedBlock(block, config, _ball(checkpoint, attention, name))
        yield name, _feedforward(checkpoint, place, norms)


def _feedforward(checkpoint: Checkpoint, place: DescribedBlock, norms: Uppers) -> Found:
    block, config, ball = place
    reason = refusal(block, config)
    if block.without or reason == "not_normed":
        return Found(reason=reason)
    if not block.maps:
        return Found(reason="experts")
    kind = activation_of(block, config)
    if kind is None:
        return Found(reason="activation")
    names = [_at(checkpoint, ball.block, path) for path in block.maps]
    given = [n for n in names if n is not None]
    if len(given) < len(names):
        return Found(reason="undescribed")
    sizes = [norms.get(n, math.inf) for n in given]
    if not all(map(math.isfinite, sizes)):
        return Found(reason="unproven")
    shifts = [_bias_norm(checkpoint, n.removesuffix(".weight")) for n in given]
    if block.fused:  # each half is at most as large as the whole
        sizes, shifts = [sizes[0], *sizes], [shifts[0], *shifts]
    B = _radius(checkpoint, block, block.feedforward_norm, ball)
    longest = [size * B + b for size, b in zip(sizes, shifts, strict=True)]
    return _product(kind, sizes, longest)


def _at(checkpoint: Checkpoint, block: str, paths: str) -> str | None:
    found = (tensor_at(checkpoint, block, path) for path in paths.split("|"))
    return next((name for name in found if name is not None), None)


def _product(kind: str, sizes: list[float], longest: list[float]) -> Found:
    slope = activation_named(kind)[1]
    if len(sizes) == 2:
        if kind == "relu_squared":
            slope = 2 * longest[0]
        if not math.isfinite(slope):
            return Found(reason="norm")
        return Found(sizes[0] * sizes[1] * slope * ROUNDING)
    if kind not in BELOW_IDENTITY:
        return Found(reason="activation")
    (gate, up, down), (g, u, _) = sizes, longest
    if not math.isfinite(g * u):
        return Found(reason="norm")
    return Found(down * (slope * gate * u + g * up) * ROUNDING)
