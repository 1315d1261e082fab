"""Softmax weights on their way: where they come from, and what they were used for."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from equipoise.anatomy.callers import Caller
from equipoise.anatomy.mixing import Axes


@dataclass(slots=True, eq=False)
class Softmax:
    """One softmax that may turn out to be attention."""

    caller: Caller
    scores: Tensor
    stride: int
    """Of the axis the softmax ran over: what tells that axis in a view."""
    version: int
    done: bool = False
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


def begun(caller: Caller, scores: Tensor, dim: int) -> Softmax:
    """Return what is known of a softmax when it has just been called."""
    scores = scores.detach()
    return Softmax(caller, scores, scores.stride(dim), _version(scores))


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to; in inference mode nobody counts."""
    return 0 if x.is_inference() else x._version


@dataclass(slots=True, eq=False)
class Trace:
    """A tensor made of softmax weights, and the scores laid out as it is."""

    softmax: Softmax
    view: Tensor
    sliced: bool = False
    """Only part of the weights: the view is the whole's."""


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Values mixed once with the weights of one softmax."""

    caller: Caller
    trace: Trace
    axes: Axes
    extra_keys: int
    """Columns of the softmax that no value belongs to."""
    out: Tensor
