"""Hidden states that modules are given: how large, how alike, and how norms scale them.

Axes, in this file:  B batch · T token · D width · N token of all sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import chain, count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.sharding import WHOLE, head_split, local_part
from equipoise.anatomy.sites import Anatomy, Reason
from equipoise.numerics.token_statistics import kurtosis, token_cosine, token_sizes
from equipoise.probes.protocols import Emit, Guarded

PARAMETRISED = Reason("norm_parametrised", hides=("norm.gain",))
Listen = Callable[[str, nn.Module, Tensor], None]
"""Called with the site, the module, and the hidden states (…, tokens, width)."""


def read_inputs(
    modules: Mapping[str, nn.Module], listen: Listen, guarded: Guarded
) -> Iterator[RemovableHandle]:
    """Yield one handle per module; each call of it hands its input to ``listen``."""
    for site, module in modules.items():
        called = guarded(partial(_called, listen, repeat(site)))
        yield hooks.before(module, called)


def read_passes(
    modules: Mapping[str, nn.Module], listen: Listen, guarded: Guarded
) -> Iterator[RemovableHandle]:
    """The same, the calls of a shared layer numbered as its attention calls are."""
    for site, module in modules.items():
        names = chain([site], map(f"{site}#{{}}".format, count(1)))
        yield hooks.before(module, guarded(partial(_called, listen, names)))


def _called(
    listen: Listen,
    sites: Iterator[str],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    # The interceptor would look at each of our own operations, attributes included.
    with torch._C.DisableTorchFunction():
        x = hidden_states(args, kwargs)
        if x is not None and x.numel():  # a batch without rows has nothing to read
            # A shard of the sequence: anything else of a DTensor needs other ranks.
            listen(next(sites), module, dense(local_part(x)))


def dense(x: Tensor) -> Tensor:
    """Return the tokens of a nested tensor's sequences, one after another."""
    return torch.cat(x.unbind()) if x.is_nested else x


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first floating tensor with a token axis among a call's arguments.

    Where there is none, of what they hold: some models pass a tuple, a dictionary or a
    dataclass on from block to block.
    """
    given = [*args, *kwargs.values()]
    held = (value for one in given for value in _held(one))
    for value in chain(given, held):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value):
        return [getattr(value, name.name) for name in fields(value)]
    return value if isinstance(value, tuple | list) else ()


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Emit B̄ = max ‖x‖₂ over tokens, of the residual stream and of attention's input.

    The paper's Theorem 5.1 uses the input of attention, its appendix E the residual
    stream; in a pre-LN model only the second grows. Both, under their own names. A
    layer that is called again (ALBERT) has one for each pass: ``layer``, ``layer#1``, …
    """

    name: str = "magnitudes"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        callers = {site.name: site.module for site in anatomy.attention}
        yield from read_passes(anatomy.blocks, partial(_B, emit, "residual.B"), guarded)
        yield from read_passes(callers, partial(_B, emit, "attention.B"), guarded)


def _B(emit: Emit, quantity: str, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    B = token_sizes(x_BTD).around_zero.amax() * x_BTD.shape[-1] ** 0.5
    emit(site, quantity, B, how="max")


SOME_TOKENS = Reason(
    "sequence_parallel",
    hides=(
        "residual.token_cosine",
        "residual.kurtosis",
    ),
)


NO_SEQUENCES = Reason("no_sequences", hides=("residual.token_cosine",))


@dataclass(slots=True)
class StreamShape:
    """Emit the kurtosis of the stream's entries and the mean cosine of its tokens.

    A cosine near 1 means that the tokens of a sequence have collapsed onto one
    direction: attention then has nothing to select, and Q and K get no gradient.
    """

    name: str = "stream"
    _tokens: dict[str, int] = field(default_factory=dict)
    """Block → how many tokens of a sequence entered it on this rank."""

    def begin_pass(self) -> None:
        self._tokens = {}

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        listen = partial(_read_stream, emit, self._tokens)
        yield from read_passes(anatomy.blocks, listen, guarded)

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        """Attention that sees more tokens than came in got them from other ranks."""
        for block, tokens in self._tokens.items():
            within = site.startswith(f"{block}.") and call.shape[2] > tokens
            if within and head_split(call.module) != WHOLE:
                emit.not_read(block, SOME_TOKENS)


def _read_stream(
    emit: Emit, tokens: dict[str, int], site: str, module: nn.Module, x_BTD: Tensor
) -> None:
    tokens[site] = x_BTD.shape[-2]
    x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    emit(site, "residual.kurtosis", kurtosis(x_BTD), how="mean")
    if x_BTD.ndim != 3:
        emit.not_read(site, NO_SEQUENCES)
    elif x_BTD.shape[1] > 1:
        emit(site, "residual.token_cosine", token_cosine(x_BTD).mean(), how="mean")


EPSILONS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, slots=True)
class NormScales:
    """Emit σ (median and smallest over tokens) and the local gain ‖γ‖_∞/σ_min.

    The gain is the largest factor by which the norm passes a small change of one
    token on; for constant γ it is exact, otherwise an upper bound.
    """

    name: str = "normalisers"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        yield from read_inputs(anatomy.norms, partial(_read_norm, emit), guarded)


def _read_norm(emit: Emit, site: str, module: nn.Module, x_BTD: Tensor) -> None:
    sigma_N = _scale(module, x_BTD).flatten()
    least = sigma_N.amin()
    emit(site, "norm.sigma.p50", sigma_N.median(), how="mean")
    emit(site, "norm.sigma.min", least, how="min")
    if is_parametrized(module, "weight"):  # to ask for it would run code
        emit.not_read(site, PARAMETRISED)
        return
    emit(site, "norm.gain", _largest_weight(module, least) / least, how="max")


def _scale(module: nn.Module, x_BTD: Tensor) -> Tensor:
    found = (getattr(module, name, None) for name in EPSILONS)
    eps = next((e for e in found if e is not None), torch.finfo(x_BTD.dtype).eps)
    sizes = token_sizes(x_BTD)
    centred = "RMS" not in type(module).__name__
    size = sizes.around_mean if centred else sizes.around_zero
    return torch.hypot(size, size.new_full((), eps**0.5))


def _largest_weight(module: nn.Module, like: Tensor) -> Tensor:
    weight = getattr(module, "weight", None)
    if weight is None:
        return torch.ones_like(like)
    largest: Tensor = local_part(weight.detach()).abs().amax().to(like.dtype)
    return largest
