"""Follows softmax weights until they mix values: only then were they attention.

A router's softmax, or the one over the vocabulary, never mixes; its trail just ends.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise.anatomy.callers import Caller
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.factored import Factors
from equipoise.anatomy.mixing import Axes, mixing_axes
from equipoise.anatomy.operations import RESHAPES, SLICES, WINDOWS, Function
from equipoise.anatomy.shapes import HEAD_COUNTS, count, four
from equipoise.anatomy.shards import local_part
from equipoise.anatomy.traces import Mix, Softmax, Trace, begun

OVERWRITTEN = "its scores were overwritten before its weights were used"
LOST = (
    "its softmax was seen, but not where its weights mix values: bands or windows of "
    "keys that are laid out anew in between, or values sampled for each query"
)
CONVOLUTION = (
    "it mixes the neighbours of each token with weights of their own, a softmax over "
    "the window: a dynamic convolution, which is not read as attention"
)
OTHER_AXIS = "its softmax runs over another axis than the one that is summed"


@dataclass(slots=True)
class Trail:
    """Every living tensor that carries softmax weights."""

    hear: Callable[[AttentionCall], None]
    miss: Callable[[Caller, str], None]
    _traces: dict[int, tuple["weakref.ref[Tensor]", list[Trace]]] = field(
        default_factory=dict
    )
    _met: dict[str, Caller] = field(default_factory=dict)
    _followed: set[str] = field(default_factory=set)
    _factors: Factors = field(init=False)

    def __post_init__(self) -> None:
        self._factors = Factors(self._report, self.miss)

    def __bool__(self) -> bool:
        return bool(self._traces)

    def settle(self) -> None:
        """Report what was held back in case more would come."""
        self._factors.settle()

    def clear(self) -> None:
        self._traces.clear()
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
        self._met[caller.name] = caller
        softmax = begun(caller, scores, dim)
        self._mark(out, [Trace(softmax, softmax.scores)])

    def follow(self, func: Function, args: tuple[Any, ...], out: Any, kw: Any) -> None:
        """Take one more call into account."""
        if func in WINDOWS:
            self._unfolded(args[2:] if func is Tensor.unfold else args[1:], kw)
        for tensor in {id(t): t for t in _tensors((args, tuple(kw.values())))}.values():
            traces = self._living(tensor)
            if not traces:
                continue
            axes = mixing_axes(func, args, tensor)
            if axes is not None:
                made = [_mix(trace, tensor, axes, out) for trace in traces]
                self._mixed(made, args)
            else:
                self._passed_on(func, args, out, (tensor, traces, kw))

    def _unfolded(self, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
        """Note windows, whose size is the next argument unless it is named."""
        size = kw.get("kernel_size", kw.get("size", args[0] if args else 0))
        for _, traces in self._traces.values():
            for trace in traces:
                trace.softmax.windows.append(size)

    def _living(self, tensor: Tensor) -> list[Trace]:
        reference, traces = self._traces.get(id(tensor), (None, []))
        if reference is None or reference() is not tensor:
            return []
        return [trace for trace in traces if not trace.softmax.done]

    def _mark(self, out: Tensor, traces: list[Trace]) -> None:
        key = id(out)
        forget = lambda _: self._traces.pop(key, None)  # noqa: E731
        known = self._living(out)
        self._traces[key] = weakref.ref(out, forget), [*known, *traces]

    def _passed_on(
        self,
        func: Function,
        args: tuple[Any, ...],
        out: Any,
        given: tuple[Tensor, list[Trace], Any],
    ) -> None:
        tensor, traces, kw = given
        if func in SLICES:
            for part in _tensors((out,)):
                whole = [Trace(t.softmax, t.view, sliced=True) for t in traces]
                self._mark(part, whole)
        elif func in RESHAPES and args and args[0] is tensor:
            views = [t if t.sliced else _reshaped(func, t, args, kw) for t in traces]
            self._mark(out, views)
        elif (
            isinstance(out, Tensor) and out.shape == tensor.shape and out is not tensor
        ):
            self._mark(out, traces)

    def _mixed(self, mixes: list[Mix], args: tuple[Any, ...]) -> None:
        """Weigh every softmax in a product; they will not be needed again."""
        # One softmax may be in a tensor twice: a reshape can return what it was given.
        fresh = list({id(mix.trace.softmax): mix for mix in mixes[::-1]}.values())[::-1]
        for mix in fresh:
            mix.trace.softmax.done = True
        gone = [
            k for k, (_, ts) in self._traces.items() if all(t.softmax.done for t in ts)
        ]
        for key in gone:
            del self._traces[key]
        for mix in fresh:
            self._followed.add(mix.caller.name)
            alone = len(fresh) > 1 or not self._has_more(mix.caller)
            self._factors.weigh(mix, _tensors(args), alone=alone)

    def _has_more(self, caller: Caller) -> bool:
        """Return whether a caller holds another softmax that has mixed nothing yet."""
        living = (ts for ref, ts in self._traces.values() if ref() is not None)
        waiting = (t.softmax for ts in living for t in ts if not t.softmax.done)
        return any(softmax.caller.name == caller.name for softmax in waiting)

    def _report(self, mix: Mix) -> None:
        softmax, view, axes = mix.trace.softmax, mix.trace.view, mix.axes
        if softmax.overwritten:
            self.miss(softmax.caller, OVERWRITTEN)
            return
        if mix.trace.sliced or view.ndim != len(axes):
            axes = (*range(view.ndim - 2), view.ndim - 2, view.ndim - 1)
        if _router(softmax, view, axes):
            return
        scores = view.permute(axes)
        if scores.shape[-2] == 1 and softmax.windowed(scores.shape[-1]):
            self.miss(softmax.caller, CONVOLUTION)
            return
        if not _over_keys(scores, softmax.stride):
            self.miss(softmax.caller, OTHER_AXIS)
            return
        self.hear(_call(softmax.caller, scores, extra=mix.extra_keys))


def _mix(trace: Trace, weights: Tensor, axes: Axes, out: Tensor) -> Mix:
    return Mix(trace.softmax.caller, trace, axes, _extra(trace, weights), out)


def _router(softmax: Softmax, view: Tensor, axes: Axes) -> bool:
    """A query axis that the softmax did not have was put there for one token's mix."""
    return view.shape[axes[-2]] == 1 and view.ndim > softmax.scores.ndim <= 3


def _over_keys(scores: Tensor, stride: int) -> bool:
    """Return whether the last axis is the softmax's, as far as strides can tell."""
    elsewhere = stride in scores.stride()[:-1]
    return scores.stride(-1) == stride or scores.shape[-1] == 1 or not elsewhere


def _extra(trace: Trace, weights: Tensor) -> int:
    """Columns of the softmax that were cut off before values were mixed: sinks."""
    cut = trace.view.shape[-1] - weights.shape[-1]
    same = weights.shape[:-1] == trace.view.shape[:-1]
    return cut if trace.sliced and same and cut > 0 else 0


def _call(caller: Caller, scores: Tensor, *, extra: int) -> AttentionCall:
    return AttentionCall(
        module=caller.module,
        kind="softmax",
        scores_BHQK=four(local_part(scores), count(caller.module, HEAD_COUNTS)),
        cross=caller.cross,
        extra_keys=extra,
    )


def _reshaped(func: Function, trace: Trace, args: tuple[Any, ...], kw: Any) -> Trace:
    return Trace(trace.softmax, func(trace.view, *args[1:], **kw))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
