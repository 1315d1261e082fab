"""Follows softmax weights until they mix values: only then were they attention.

A router's softmax, or the one over the vocabulary, never mixes anything. Every tensor
made of softmax weights is known with the scores laid out as it is, through reshapes,
slices and dropout, until a product mixes values with it.

Efficient attention mixes values with a softmax over the tokens, and what that made with
a softmax over features: softmax(q) (softmax(k)ᵀ v). Neither is a row of attention. Each
alone looks like one, so a mix waits while its caller has another softmax in use.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import OTHER_WEIGHTS, AttentionCall
from equipoise.anatomy.head_counts import HEAD_COUNTS, count
from equipoise.anatomy.mixing import Axes, mixing_axes
from equipoise.anatomy.operations import RESHAPES, SLICES, WINDOWS, Function
from equipoise.anatomy.sdpa import four
from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Reason


@dataclass(slots=True, eq=False)
class SoftmaxCall:
    """One softmax that may turn out to be attention."""

    caller: Caller
    scores: Tensor
    stride: int
    """Of the axis the softmax ran over: what tells that axis in a view."""
    version: int
    done: bool = False
    again: bool = False
    """Whether the scores were made of another softmax: Sinkhorn's rounds take turns.
    """
    windows: list[Any] = field(default_factory=list)
    """What was unfolded since: sizes of windows, as the function was given them."""

    def windowed(self, width: int) -> bool:
        """Whether windows as wide as the softmax were cut out since it was called."""
        sizes = (w if isinstance(w, tuple | list) else (w,) for w in self.windows)
        return width in map(prod, sizes)

    @property
    def overwritten(self) -> bool:
        """Whether the scores are no longer those that the softmax was given."""
        return _version(self.scores) != self.version


def started_softmax(caller: Caller, scores: Tensor, dim: int) -> SoftmaxCall:
    """Return what is known of a softmax when it has just been called."""
    scores = scores.detach()
    return SoftmaxCall(caller, scores, scores.stride(dim), _version(scores))


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to; in inference mode torch counts none."""
    return 0 if x.is_inference() else x._version


@dataclass(slots=True, eq=False)
class WeightTensor:
    """A tensor made of softmax weights, and the scores laid out as it is."""

    softmax: SoftmaxCall
    view: Tensor
    sliced: bool = False
    """Only part of the weights: the view is of all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Values mixed once with the weights of one softmax."""

    caller: Caller
    carrier: WeightTensor
    axes: Axes
    extra_keys: int
    """Columns of the softmax that no value belongs to."""
    out: Tensor
    weights: Tensor
    """What mixed the values: what became of the softmax by then."""


FACTORED = Reason("product_of_softmaxes")


@dataclass(slots=True)
class PendingMixes:
    """Mixes that wait until it is clear whether they were half of a product."""

    report: Callable[[Mix], None]
    miss: Callable[[Caller, Reason], None]
    _waiting: dict[str, Mix] = field(default_factory=dict)

    def add(self, mix: Mix, operands: Iterable[Tensor], *, alone: bool) -> None:
        """Report a mix, now or once its caller has mixed again, or name the product."""
        before = self._waiting.pop(mix.caller.name, None)
        if before is not None:
            if any(_same(before.out, operand) for operand in operands):
                self.miss(mix.caller, FACTORED)
                return
            self.report(before)
        if alone:
            self.report(mix)
        else:
            self._waiting[mix.caller.name] = mix

    def finish_closing(self) -> None:
        """Report what still waits: nothing was made of it."""
        while self._waiting:
            self.report(self._waiting.pop(next(iter(self._waiting))))


def _same(out: Tensor, operand: Tensor) -> bool:
    """Return whether an operand is what was made, or another view of it."""
    base = out if out._base is None else out._base
    return operand is base or operand._base is base or operand is out


OVERWRITTEN = Reason("scores_overwritten")
LOST = Reason("weights_lost")
CONVOLUTION = Reason("convolution")
OTHER_AXIS = Reason("other_axis")


@dataclass(slots=True)
class SoftmaxFlow:
    """Every living tensor that carries softmax weights."""

    report: Callable[[AttentionCall], None]
    miss: Callable[[Caller, Reason], None]
    askew: Callable[[AttentionCall], None] | None = None
    """Takes what would be attention, had its softmax run over the keys."""
    _carriers: dict[int, tuple["weakref.ref[Tensor]", list[WeightTensor]]] = field(
        default_factory=dict
    )
    _met: dict[str, Caller] = field(default_factory=dict)
    _followed: set[str] = field(default_factory=set)
    _pending: PendingMixes = field(init=False)

    def __post_init__(self) -> None:
        self._pending = PendingMixes(self._report, self.miss)

    def __bool__(self) -> bool:
        return bool(self._carriers)

    def finish_closing(self) -> None:
        """Report the mixes that waited for another one."""
        self._pending.finish_closing()

    def clear(self) -> None:
        self._carriers.clear()
        self._met.clear()
        self._followed.clear()

    def lost(self) -> list[Caller]:
        """Return who called softmax, and never mixed anything with its weights."""
        return [who for name, who in self._met.items() if name not in self._followed]

    def start(self, caller: Caller, out: Any, given: tuple[Tensor, int | None]) -> None:
        """Begin at ``out = softmax(scores, dim)``."""
        scores, dim = given
        if dim is None or scores.ndim < 2 or not isinstance(out, Tensor):
            return
        if "hyperconnection" in type(caller.module).__name__.lower():
            return  # mixes the streams of each token, and no tokens
        self._met[caller.name] = caller
        softmax = started_softmax(caller, scores, dim)
        softmax.again = bool(self._living(scores))
        self._mark(out, [WeightTensor(softmax, softmax.scores)])

    def follow(self, func: Function, args: tuple[Any, ...], out: Any, kw: Any) -> None:
        """Take one more call into account."""
        if func in WINDOWS:
            self._unfolded(args[2:] if func is Tensor.unfold else args[1:], kw)
        for tensor in {id(t): t for t in _tensors((args, tuple(kw.values())))}.values():
            carriers = self._living(tensor)
            if not carriers:
                continue
            axes = mixing_axes(func, args, tensor)
            if axes is not None:
                made = [_mix(carrier, tensor, axes, out) for carrier in carriers]
                self._mixed(made, args)
            else:
                self._passed_on(func, args, out, (tensor, carriers, kw))

    def _unfolded(self, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        """Note windows, whose size is the next argument unless it is named."""
        size = kw.get("kernel_size", kw.get("size", args[0] if args else 0))
        for _, carriers in self._carriers.values():
            for carrier in carriers:
                carrier.softmax.windows.append(size)

    def _living(self, tensor: Tensor) -> list[WeightTensor]:
        reference, carriers = self._carriers.get(id(tensor), (None, []))
        if reference is None or reference() is not tensor:
            return []
        return [carrier for carrier in carriers if not carrier.softmax.done]

    def _mark(self, out: Tensor, carriers: list[WeightTensor]) -> None:
        key = id(out)
        forget = lambda _: self._carriers.pop(key, None)  # noqa: E731
        known = self._living(out)
        self._carriers[key] = weakref.ref(out, forget), [*known, *carriers]

    def _passed_on(
        self,
        func: Function,
        args: tuple[Any, ...],
        out: Any,
        given: tuple[Tensor, list[WeightTensor], Any],
    ) -> None:
        tensor, carriers, kw = given
        if func in SLICES:
            for part in _tensors((out,)):
                parts = [WeightTensor(t.softmax, t.view, sliced=True) for t in carriers]
                self._mark(part, parts)
        elif func in RESHAPES and args and args[0] is tensor:
            views = [t if t.sliced else _reshaped(func, t, args, kw) for t in carriers]
            self._mark(out, views)
        elif (
            isinstance(out, Tensor) and out.shape == tensor.shape and out is not tensor
        ):
            self._mark(out, carriers)

    def _mixed(self, mixes: list[Mix], args: tuple[Any, ...]) -> None:
        """Take every softmax in a product as mixed; none will be needed again."""
        # One softmax may be in a tensor twice: a reshape can return what it was given.
        fresh = list({id(mix.carrier.softmax): mix for mix in mixes[::-1]}.values())[
            ::-1
        ]
        for mix in fresh:
            mix.carrier.softmax.done = True
        gone = [
            k
            for k, (_, ts) in self._carriers.items()
            if all(t.softmax.done for t in ts)
        ]
        for key in gone:
            del self._carriers[key]
        for mix in fresh:
            self._followed.add(mix.caller.name)
            alone = len(fresh) > 1 or not self._has_more(mix.caller)
            self._pending.add(mix, _tensors(args), alone=alone)

    def _has_more(self, caller: Caller) -> bool:
        """Return whether a caller holds another softmax that has mixed nothing yet."""
        living = (ts for ref, ts in self._carriers.values() if ref() is not None)
        waiting = (t.softmax for ts in living for t in ts if not t.softmax.done)
        return any(softmax.caller.name == caller.name for softmax in waiting)

    def _report(self, mix: Mix) -> None:
        softmax, view, axes = mix.carrier.softmax, mix.carrier.view, mix.axes
        if softmax.overwritten:
            self.miss(softmax.caller, OVERWRITTEN)
            return
        if mix.carrier.sliced or view.ndim != len(axes):
            axes = (*range(view.ndim - 2), view.ndim - 2, view.ndim - 1)
        if _router(softmax, view, axes):
            return
        scores = view.permute(axes)
        if scores.shape[-2] == 1 and softmax.windowed(scores.shape[-1]):
            self.miss(softmax.caller, CONVOLUTION)
            return
        weights = mix.weights.permute(axes) if mix.weights.ndim == len(axes) else None
        if not _over_keys(scores, softmax.stride):
            self.miss(softmax.caller, OTHER_AXIS)
            once = not softmax.again
            if self.askew is not None and weights is not None and once:
                self.askew(_call(softmax.caller, scores, extra=0, weights=weights))
            return
        call = _call(softmax.caller, scores, extra=mix.extra_keys, weights=weights)
        self.report(call)


@dataclass(slots=True)
class DeclaredWeights:
    """Reads weights that are no softmax where a family declares that there are some.

    Scores are a product of two activations. A later product with an operand laid out as
    they are mixes values: the operand are the weights, whatever function made them.
    """

    sites: Container[int]
    """Ids of the modules that declare weights by another function."""
    report: Callable[[AttentionCall], None]
    _scores: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sites)

    def follow(
        self, caller: Caller, func: Function, args: tuple[Any, ...], out: Any
    ) -> None:
        """Take one product into account."""
        operands = list(_tensors(args))
        learned = any(isinstance(x, nn.Parameter) for x in operands)
        if id(caller.module) not in self.sites or learned:
            return
        shapes = self._scores.setdefault(caller.name, set())
        for weights in operands:
            axes = None
            if tuple(weights.shape) in shapes:
                axes = mixing_axes(func, args, weights)
            if axes is not None:
                shapes.clear()
                rows = local_part(weights.detach().permute(axes)).log()
                call = _call(caller, rows, extra=0)
                self.report(replace(call, kind=OTHER_WEIGHTS))
                return
        shapes.add(tuple(out.shape))


def _mix(carrier: WeightTensor, weights: Tensor, axes: Axes, out: Tensor) -> Mix:
    extra, who = _extra(carrier, weights), carrier.softmax.caller
    return Mix(who, carrier, axes, extra, out, weights.detach())


def _router(softmax: SoftmaxCall, view: Tensor, axes: Axes) -> bool:
    """A query axis that the softmax did not have was put there for one token's mix."""
    return view.shape[axes[-2]] == 1 and view.ndim > softmax.scores.ndim <= 3


def _over_keys(scores: Tensor, stride: int) -> bool:
    """Return whether the last axis is the softmax's, as far as strides can tell."""
    elsewhere = stride in scores.stride()[:-1]
    return scores.stride(-1) == stride or scores.shape[-1] == 1 or not elsewhere


def _extra(carrier: WeightTensor, weights: Tensor) -> int:
    """Columns of the softmax that were cut off before values were mixed: sinks."""
    cut = carrier.view.shape[-1] - weights.shape[-1]
    same = weights.shape[:-1] == carrier.view.shape[:-1]
    return cut if carrier.sliced and same and cut > 0 else 0


def _call(
    caller: Caller, scores: Tensor, *, extra: int, weights: Tensor | None = None
) -> AttentionCall:
    heads = count(caller.module, HEAD_COUNTS)
    scores_BHQK = four(local_part(scores), heads)
    sinks_H = _sinks_beside(caller.module, scores_BHQK) if not extra else None
    if sinks_H is not None:
        column = sinks_H.to(scores_BHQK)[:, None, None]
        column = column.expand(*scores_BHQK.shape[:-1], 1)
        scores_BHQK, extra = torch.cat((scores_BHQK, column), -1), 1
    weights_BHQK = None if weights is None else four(local_part(weights), heads)
    if weights_BHQK is not None and weights_BHQK.shape[:3] != scores_BHQK.shape[:3]:
        weights_BHQK = None
    return AttentionCall(
        module=caller.module,
        kind="softmax",
        scores_BHQK=scores_BHQK,
        weights_BHQK=weights_BHQK,
        cross=caller.cross,
        extra_keys=extra,
        sinks=extra,
    )


def _sinks_beside(module: nn.Module | None, scores_BHQK: Tensor) -> Tensor | None:
    """Return learned sinks that are no column of the softmax.

    Granite scales what was mixed instead, by the keys' share beside the sink.
    """
    sinks = None if module is None else module._parameters.get("sinks")
    if sinks is None:
        return None
    here = local_part(sinks.detach()).flatten()
    return here if len(here) == scores_BHQK.shape[1] else None


def _reshaped(
    func: Function, carrier: WeightTensor, args: tuple[Any, ...], kw: Any
) -> WeightTensor:
    return WeightTensor(carrier.softmax, func(carrier.view, *args[1:], **kw))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
