"""The loss as the loop computes it, read off its graph before the backward pass.

Autograd's graph keeps what a loss function was given: targets, ignored index, the kind
of mean, log-probabilities. So nothing is wrapped, and no mode is on while the loss is
computed, be it in the loop, in the model or in a trainer. The graph has no names for
what compiled code or a fused kernel computed: that is said to be unseen.

A saved tensor is read only where no hook unpacks it: under activation checkpointing or
offloading, reading it would run the model's code again.

Axes, in this file:  N row of logits · B sequence · T position · V class.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from equipoise.watching.loop.loss_rows import (
    LOG_SOFTMAX,
    Chain,
    Node,
    RowLayout,
    saved,
    signed,
)

MOST_NODES = 1024
"""A loss's own arithmetic is nearest to it; what lies further is the model."""

NLL = {"NllLossBackward0", "NllLoss2DBackward0"}
PICKS = {"GatherBackward0", "IndexBackward0", "TakeAlongDimBackward0"}
OTHERS = {
    "MseLossBackward0": "mse_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
    "SoftMarginLossBackward0": "soft_margin_loss",
    "MultiMarginLossBackward0": "multi_margin_loss",
    "MultilabelMarginLossBackward0": "multilabel_margin_loss",
    "CtcLossBackward0": "ctc_loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """One loss function, as the graph shows it."""

    function: str
    node: Node
    given: str = "unknown"
    """``logits``, ``probabilities``, ``log_probabilities`` or ``unknown``."""
    target_N: Tensor | None = None
    """Class of each row; None where targets are no classes, or are not seen."""
    log_p: Tensor | None = None
    """Log-probabilities that were compared, by row and class."""
    classes: int | None = None
    ignore_index: int | None = None
    reduction: str = ""
    class_weights: bool = False
    smoothing: float = 0.0
    layout: RowLayout | None = None

    @property
    def counted_N(self) -> Tensor | None:
        """Return which targets are not ignored."""
        if self.target_N is None:
            return None
        if self.ignore_index is None:
            return torch.ones_like(self.target_N, dtype=torch.bool)
        return self.target_N != self.ignore_index


@dataclass(frozen=True, slots=True)
class LossGraph:
    """What the graph of a loss shows above the model."""

    calls: tuple[LossCall, ...]
    unseen: tuple[str, ...]
    """What computes a loss out of sight: ``compiled``, ``fused_loss``."""
    has_constant: bool
    """Whether something is added to the loss that has no graph."""


def read_graph(roots: Sequence[Tensor]) -> LossGraph:
    """Return the loss functions of what a backward pass begins with."""
    calls, unseen, constant = list[LossCall](), list[str](), False
    soft: set[Node] = set()
    walk = _Walk(roots)
    for node in walk:
        name = node.name()
        if (call := _call(node, name)) is not None:
            calls.append(call)
        elif (hidden := _unseen(node, name)) is not None:
            unseen.append(hidden)
        elif name == LOG_SOFTMAX:
            soft.add(node)
        else:
            constant |= name in SUMS and _scalar_sum(node, walk)
            continue
        walk.leave(node)
    used = {_log_softmax(call.node) for call in calls}
    calls = [_smoothed(call, walk, soft) for call in calls]
    if soft - used:
        calls.append(LossCall(function="log_softmax", node=next(iter(soft - used))))
    return LossGraph(tuple(calls), tuple(dict.fromkeys(unseen)), constant)


def _call(node: Node, name: str) -> LossCall | None:
    """Return the loss function that a node is of, if it is of one."""
    if name in NLL:
        return _nll(node)
    if name in OTHERS:
        return _other(node, OTHERS[name])
    return _picked(node) if name in PICKS else None


def _unseen(node: Node, name: str) -> str | None:
    """Return why a loss under this node is out of sight, if it is."""
    if name == "CompiledFunctionBackward":
        return "compiled"
    bare = name.lower().replace("_", "")
    words = ("crossentropy", "fusedlinear", "chunkedloss")
    fused = isinstance(node, BackwardCFunction) and any(w in bare for w in words)
    return "fused_loss" if fused else None


class _Walk:
    """Yields nodes from the roots on, the nearest first, but not below what is left."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self.seen: dict[Node, Node | None] = {}
        """Node → the node by which it was met first."""
        self._left: set[Node] = set()
        self._waiting = deque[tuple[Node, Node]]((r.grad_fn, None) for r in roots)

    def leave(self, node: Node) -> None:
        self._left.add(node)

    def __iter__(self) -> Iterator[Node]:
        while self._waiting and len(self.seen) < MOST_NODES:
            node, above = self._waiting.popleft()
            if node is None or node in self.seen:
                continue
            self.seen[node] = above
            yield node
            if node not in self._left:
                self._waiting.extend((n, node) for n, _ in node.next_functions)


def _scalar_sum(node: Node, walk: _Walk) -> bool:
    """Return whether a sum has one summand without a graph, and is part of the loss.

    What lies under a mean or a sum over elements is no longer the loss itself.
    """
    if all(following is not None for following, _ in node.next_functions):
        return False
    above = walk.seen[node]
    while above is not None:
        if above.name() not in _SCALAR:
            return False
        above = walk.seen[above]
    return True


SUMS = {"AddBackward0", "SubBackward0"}
_SCALAR = {*SUMS, "MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_SCALAR |= {"NegBackward0"}


REDUCTIONS = ("none", "mean", "sum")


def _nll(node: Node) -> LossCall:
    chain = Chain.of(node, 0)
    target, log_p = saved(node, "target"), saved(node, "self")
    known = chain.end is not None and chain.end.name() == LOG_SOFTMAX
    given = chain.given
    if known:  # of F.cross_entropy, or log_softmax before F.nll_loss: the same graph
        chain = Chain.of(chain.end, 0, chain)
        given = "logits" if chain.given == "unknown" else chain.given
    classes = None
    if log_p is not None:
        classes = log_p.shape[1 if log_p.ndim > 1 else 0]
        if log_p.ndim > 2:
            log_p = log_p.movedim(1, -1).reshape(-1, classes)
    return LossCall(
        function="cross_entropy" if known else "nll_loss",
        node=node,
        given=chain.checked(given, classes),
        target_N=None if target is None else target.detach().reshape(-1),
        log_p=None if log_p is None else log_p.detach().reshape(-1, classes),
        classes=classes,
        ignore_index=signed(node._saved_ignore_index),
        reduction=REDUCTIONS[node._saved_reduction],
        class_weights=saved(node, "weight") is not None,
        layout=chain.layout(None if target is None else target.numel()),
    )


def _other(node: Node, function: str) -> LossCall:
    chain = Chain.of(node, 0)
    given = chain.given
    expected = function == "binary_cross_entropy_with_logits"
    return LossCall(
        function=function,
        node=node,
        given="logits" if expected and given == "unknown" else given,
        reduction=REDUCTIONS[getattr(node, "_saved_reduction", 1)],
    )


def _picked(node: Node) -> LossCall | None:
    """Return a cross-entropy that picks log-probabilities by target itself."""
    chain = Chain.of(node, 0)
    if chain.end is None or chain.end.name() != LOG_SOFTMAX:
        return None
    target = _picks(node)
    result = saved(chain.end, "result")
    if target is None or result is None:
        return None
    classes = result.shape[-1]
    chain = Chain.of(chain.end, 0, chain)
    given = "logits" if chain.given == "unknown" else chain.given
    return LossCall(
        function="log_softmax picked by target",
        node=node,
        given=chain.checked(given, classes),
        target_N=target.detach().reshape(-1),
        log_p=result.detach().reshape(-1, classes),
        classes=classes,
        reduction="none",
        layout=chain.layout(target.numel()),
    )


def _picks(node: Node) -> Tensor | None:
    """Return the classes that are picked, one a row."""
    if node.name() == "IndexBackward0":
        last: Tensor | None = (saved(node, "indices") or [None])[-1]
        if last is None or last.is_floating_point() or last.dtype == torch.bool:
            return None
        return last if last.ndim == 1 else None
    index = saved(node, "index")
    one = isinstance(index, Tensor) and index.ndim and index.shape[-1] == 1
    return index[..., 0] if one else None


def _log_softmax(node: Node) -> Node | None:
    chain = Chain.of(node, 0)
    known = chain.end is not None and chain.end.name() == LOG_SOFTMAX
    return chain.end if known else None


def _smoothed(call: LossCall, walk: _Walk, soft: set[Node]) -> LossCall:
    """Return the call with its label smoothing: torch mixes in the mean of all."""
    parent = walk.seen.get(call.node)
    whole = _log_softmax(call.node) in soft
    if call.function != "cross_entropy" or not whole or parent is None:
        return call
    factor = getattr(parent, "_saved_other", None)
    if parent.name() != "MulBackward1" or not isinstance(factor, float):
        return call
    return replace(call, smoothing=1.0 - factor)


def reaches(
    roots: Sequence[Tensor], wanted: Sequence[Node], *, most: int
) -> list[bool] | None:
    """Return which nodes are part of a loss's graph; None if it is too large to say."""
    missing, seen = set(wanted), set[Node]()
    waiting = deque(root.grad_fn for root in roots)
    while waiting and missing:
        if len(seen) >= most:
            return None
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        missing.discard(node)
        waiting.extend(following for following, _ in node.next_functions)
    return [node not in missing for node in wanted]
