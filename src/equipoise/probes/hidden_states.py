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
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.call_stack import Caller
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


FUNCTIONS: frozenset[Any] = frozenset({F.rms_norm, F.layer_norm})


@dataclass(slots=True)
class NormScales:
    """Emit σ (median and smallest over tokens) and the local gain ‖γ‖_∞/σ_min.

    The gain is the largest factor by which the norm passes a small change of one
    token on; for constant γ it is exact, otherwise an upper bound. γ is what the norm
    multiplies by: some store γ - 1 (Gemma, Qwen3-Next, Nemotron), which the first token
    of its first call tells. In a model without norm modules, norms that are called as
    functions are read under the module that calls them, numbered in order.
    """

    name: str = "normalisers"
    operations: frozenset[Any] = frozenset()
    _offsets: dict[int, Tensor] = field(default_factory=dict)
    """Id of a norm → what it adds to its stored γ."""
    _emit: Emit | None = None
    _calls: dict[str, int] = field(default_factory=dict)

    def begin_pass(self) -> None:
        """Number the functional norms of each module from the first."""
        self._calls = {}

    def on_operation(self, caller: Caller, function: Any, args: Any) -> None:
        """Read a norm that is a function, as nanochat's are."""
        x = next(iter(args), None)
        if self._emit is None or not isinstance(x, Tensor) or not x.numel():
            return
        number = self._calls[caller.name] = self._calls.get(caller.name, -1) + 1
        site = f"{caller.name}#{number}" if number else caller.name
        weight = next((w for w in args[2:3] if isinstance(w, Tensor)), None)
        with torch._C.DisableTorchFunction():
            sizes = token_sizes(dense(local_part(x.detach())))
            centred = function is F.layer_norm
            sigma_N = (sizes.around_mean if centred else sizes.around_zero).flatten()
            largest = torch.ones_like(sigma_N[0])
            if weight is not None:
                largest = local_part(weight.detach()).abs().amax().to(largest.dtype)
            _emit_scales(self._emit, site, sigma_N, largest)

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._emit = emit
        # Where norms are modules, a look at each function they call would be wasted.
        self.operations = frozenset() if anatomy.norms else FUNCTIONS
        for site, module in anatomy.norms.items():
            called = guarded(partial(self._called, emit, site))
            yield hooks.after(module, called, with_kwargs=True)

    def _called(
        self,
        emit: Emit,
        site: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        with torch._C.DisableTorchFunction():
            given = hidden_states(args, kwargs)
            if given is None or not given.numel():
                return
            x_BTD = dense(local_part(given))
            if id(module) not in self._offsets and isinstance(output, Tensor):
                y_BTD = dense(local_part(output.detach()))
                self._offsets[id(module)] = gain_offset(module, x_BTD.detach(), y_BTD)
            _read_norm(emit, site, module, x_BTD, self._offsets.get(id(module)))


def _read_norm(
    emit: Emit, site: str, module: nn.Module, x_BTD: Tensor, offset: Tensor | None
) -> None:
    sigma_N = _scale(module, x_BTD).flatten()
    largest = None
    if is_parametrized(module, "weight"):  # to ask for it would run code
        emit.not_read(site, PARAMETRISED)
    else:
        largest = _largest_weight(module, sigma_N[0], offset)
    _emit_scales(emit, site, sigma_N, largest)


def _emit_scales(
    emit: Emit, site: str, sigma_N: Tensor, largest: Tensor | None
) -> None:
    least = sigma_N.amin()
    emit(site, "norm.sigma.p50", sigma_N.median(), how="mean")
    emit(site, "norm.sigma.min", least, how="min")
    if largest is not None:
        emit(site, "norm.gain", largest / least, how="max")


def _scale(module: nn.Module, x_BTD: Tensor) -> Tensor:
    found = (getattr(module, name, None) for name in EPSILONS)
    eps = next((e for e in found if e is not None), torch.finfo(x_BTD.dtype).eps)
    sizes = token_sizes(x_BTD)
    size = sizes.around_mean if _centres(module) else sizes.around_zero
    return torch.hypot(size, size.new_full((), eps**0.5))


def _centres(module: nn.Module) -> bool:
    return "RMS" not in type(module).__name__


def _largest_weight(module: nn.Module, like: Tensor, offset: Tensor | None) -> Tensor:
    weight = getattr(module, "weight", None)
    if weight is None:
        return torch.ones_like(like)
    gamma = local_part(weight.detach())
    gamma = gamma if offset is None else gamma + offset.to(gamma)
    largest: Tensor = gamma.abs().amax().to(like.dtype)
    return largest


CLEAR = 0.1
"""How much of what a norm returned may be left, for its stored γ to be γ - 1."""


def gain_offset(module: nn.Module, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return the number that a norm adds to its stored γ: 0 or 1, by its first token.

    >>> norm, x = nn.LayerNorm(8), torch.randn(1, 1, 8)
    >>> gain_offset(norm, x, norm(x)), gain_offset(norm, x, norm(x) * 2)
    (tensor(0.), tensor(1.))
    """
    weight, bias = (_local(module, name) for name in ("weight", "bias"))
    if weight is None or x_BTD.shape != y_BTD.shape:
        return x_BTD.new_zeros(())
    if weight.shape != x_BTD.shape[-1:]:
        return x_BTD.new_zeros(())
    x_D, y_D = (x.flatten(0, -2)[0].float() for x in (x_BTD, y_BTD))
    y_D = y_D if bias is None else y_D - bias
    normed_D = (x_D - x_D.mean() if _centres(module) else x_D) / _scale(module, x_D)
    left = [(normed_D * (weight + k) - y_D).norm() for k in (0, 1)]
    is_shifted: Tensor = (left[1] < left[0]) & (left[1] < CLEAR * y_D.norm())
    return is_shifted.to(x_BTD.dtype)


def _local(module: nn.Module, name: str) -> Tensor | None:
    """Return this rank's part of a norm's parameter, wide, without running its code."""
    held = module._parameters.get(name)
    return None if held is None else local_part(held.detach()).float()
