"""Where the rows of a loss come from: the operations between the model and its loss.

Moves (a shape, a slice, a copy, a format) leave numbers as they are; the first other
operation says whether they are logits or probabilities. Under the output layer, slices
say which positions of the model's output the loss was given.

Axes, in this file:  B sequence · T position · V class.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Node = Any
"""A node of autograd's graph; one that is kept keeps the graph."""
MOST_STEPS = 32
"""Operations between a loss function and the model's blocks."""

LOG_SOFTMAX = "LogSoftmaxBackward0"
# The same numbers, elsewhere: another shape, copy, place or format.
MOVES = {
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
    *("CloneBackward0", "SliceBackward0", "ToCopyBackward0", "AliasBackward0"),
    *("UnsqueezeBackward0", "UnsqueezeBackward1", "SqueezeBackward0"),
    *("SqueezeBackward1", "SqueezeBackward2", "TransposeBackward0"),
    *("PermuteBackward0", "ExpandBackward0", "AsStridedBackward0"),
}
# Where the input of a product is among a node's own inputs.
PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1, "MkldnnLinearBackward": 0}
PRODUCTS |= {"LinearBackward0": 0}
# One number in, one number out, at the same place.
ELEMENTWISE = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
ELEMENTWISE |= {"TanhBackward0", "AddBackward0", "ToCopyBackward0"}
MIXED = {"PermuteBackward0", "AsStridedBackward0", "ExpandBackward0"}
"""Moves after which it is not followed which row is which."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of a loss lie in the model's output: a part of its (B, T)."""

    full: tuple[int, int]
    """First two sizes of what the model put out."""
    start: tuple[int, int]
    sizes: tuple[int, int]
    """First and number of the places that the loss is given, along both."""
    turned: bool = False
    """Whether the rows come with the second axis first: (T, B) of what is (B, T)."""


def saved(node: Node, name: str) -> Any:
    """Return a saved value, or None if reading it would run other code."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return getattr(node, f"_saved_{name}", None)
    for one in raw if isinstance(raw, tuple | list) else (raw,):
        if getattr(one, "unpack_hook", None) is not None:
            return None
    try:
        return getattr(node, f"_saved_{name}")
    except RuntimeError:  # written to since, or freed
        return None


def signed(number: int) -> int:
    """Return a saved int64, which autograd hands out without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


@dataclass(slots=True)
class Chain:
    """What lies between a loss function and what the model computed."""

    end: Node | None
    """The first node that changes numbers; None where the graph ends."""
    moved: list[Node]
    """Moves passed on the way, the last one first."""

    @classmethod
    def of(cls, node: Node, place: int, above: "Chain | None" = None) -> "Chain":
        """Return the chain below the input of a node, joined to one above it."""
        moved = [] if above is None else list(above.moved)
        following = node.next_functions[place][0]
        while following is not None and following.name() in MOVES:
            moved.append(following)
            following = following.next_functions[0][0]
        return cls(following, moved)

    @property
    def given(self) -> str:
        """Return the kind of numbers the model computed, by the last operation."""
        name = "" if self.end is None else self.end.name()
        if name in ("SoftmaxBackward0", "SigmoidBackward0"):
            return "probabilities" if name.startswith("Softmax") else "sigmoid"
        if name == LOG_SOFTMAX:
            return "log_probabilities"
        if name in PRODUCTS:
            return "logits"
        if name == "ExpBackward0":
            under = Chain.of(self.end, 0)
            if under.end is not None and under.end.name() == LOG_SOFTMAX:
                return "probabilities"
        return "unknown"

    def checked(self, given: str, classes: int | None) -> str:
        """Return the kind, once a softmax is known to run over the classes."""
        if self.end is None or self.end.name() != "SoftmaxBackward0":
            return given
        result = saved(self.end, "result")
        if result is None:
            return "unknown"
        axis = signed(self.end._saved_dim) % result.ndim
        others = [n for i, n in enumerate(result.shape) if i != axis]
        last = axis == result.ndim - 1 and not self._turned
        fits = result.shape[axis] == classes and (last or classes not in others)
        return given if fits else "unknown"

    @property
    def _turned(self) -> bool:
        return any(
            n.name() in ("TransposeBackward0", "PermuteBackward0") for n in self.moved
        )

    def layout(self, rows: int | None) -> RowLayout | None:
        """Return where the rows lie, if slices and shapes alone say so."""
        sizes: tuple[int, ...] | None = None
        cuts: list[Cut] = []
        turned = False
        for node in self._followed():
            if _turns(node):
                turned = not turned
                cuts = [
                    cut._replace(axis=_OTHER.get(cut.axis, cut.axis)) for cut in cuts
                ]
                sizes = None if sizes is None else (sizes[1], sizes[0], *sizes[2:])
                continue
            name, here = node.name(), getattr(node, "_saved_self_sym_sizes", None)
            if name in MIXED or (name == "TransposeBackward0" and not _classes(node)):
                return None
            if name == "SliceBackward0" and here is not None:
                cut = _cut(node, here)
                if cut is None:
                    return None
                cuts.append(cut)
            if here is not None and len(here) == 3 and name != "TransposeBackward0":
                sizes = tuple(here)
        if sizes is None or rows is None:
            return None
        placed = _placed((sizes[0], sizes[1]), cuts, rows)
        return None if placed is None else replace(placed, turned=turned)

    def _followed(self) -> Iterator[Node]:
        """Yield the moves, and those under the output layer, towards the model."""
        yield from self.moved
        node, products = self.end, 0
        for _ in range(MOST_STEPS):
            if node is None or (place := _input(node)) is None or products > 2:
                return
            products += node.name() in PRODUCTS
            if node.name() in MOVES:
                yield node
            node = node.next_functions[place][0]


class Cut(NamedTuple):
    """A slice of the first or second axis; of the classes alone, all of the first."""

    axis: int
    first: int
    end: int | None
    step: int


def _input(node: Node) -> int | None:
    """Return which input of a node comes from the model; None where that is unclear."""
    name = node.name()
    if name in PRODUCTS:
        return PRODUCTS[name]
    if name in MOVES or name in ("SoftmaxBackward0", LOG_SOFTMAX):
        return 0
    inputs = [i for i, (n, _) in enumerate(node.next_functions) if n is not None]
    return inputs[0] if name in ELEMENTWISE and len(inputs) == 1 else None


def _classes(node: Node) -> bool:
    """Return whether a transposition moves the classes: (B, T, V) to (B, V, T)."""
    return {signed(node._saved_dim0) % 3, signed(node._saved_dim1) % 3} == {1, 2}


_OTHER = {0: 1, 1: 0}


def _turns(node: Node) -> bool:
    """Return whether a node exchanges the first two of three axes."""
    if node.name() == "PermuteBackward0":
        return tuple(signed(n) % 3 for n in node._saved_dims) == (1, 0, 2)
    if node.name() != "TransposeBackward0":
        return False
    following = node.next_functions[0][0]
    flat = following is None or following.name() == "TBackward0"
    return not flat and {signed(node._saved_dim0), signed(node._saved_dim1)} in (
        {0, 1},
        {-3, -2},
    )


def _cut(node: Node, sizes: tuple[int, ...]) -> Cut | None:
    """Return a slice's axis and extent; None where it cuts rows that are flat."""
    axis = signed(node._saved_dim) % len(sizes)
    if axis == len(sizes) - 1:  # a vocabulary that is padded
        return Cut(0, 0, None, 1)
    if len(sizes) != 3:
        return None
    begin, end = signed(node._saved_start), signed(node._saved_end)
    return Cut(axis, *slice(begin, end, node._saved_step).indices(sizes[axis]))


def _placed(full: tuple[int, int], cuts: list[Cut], rows: int) -> RowLayout | None:
    start, sizes = [0, 0], list(full)
    for axis, first, end, step in reversed(cuts):
        if step != 1:
            return None
        start[axis] += first
        sizes[axis] = sizes[axis] if end is None else max(0, end - first)
    if sizes[0] * sizes[1] != rows:
        return None
    return RowLayout(full, (start[0], start[1]), (sizes[0], sizes[1]))
