"""Does a product mix values with softmax weights? If so, which axes are which.

Axes, in this file:  Q query · K key · … anything else, batch and heads.
Attention sums over the axis the softmax ran over, and every query mixes the same
values. A router's weights differ in the second: each token has experts' outputs of its
own, so the token's axis is in the values too.
"""

from typing import Any

from torch import Tensor, nn

from equipoise.anatomy.operations import (
    ADDED_PRODUCTS,
    EINSUM,
    PRODUCTS,
    REVERSED_PRODUCTS,
    TIMES,
    Function,
)

Arguments = tuple[Any, ...]
Axes = tuple[int, ...]
"""An order of the weights' axes that ends in Q, K."""


def mixing_axes(func: Function, args: Arguments, weights: Tensor) -> Axes | None:
    """Return the order of the weights' axes if the call mixes values with them."""
    if func in PRODUCTS:
        return _of_product(func, args, weights)
    if func is EINSUM:
        return _of_einsum(args, weights)
    return _of_times(args, weights) if func in TIMES else None


def _of_product(func: Function, args: Arguments, weights: Tensor) -> Axes | None:
    left, right = args[1:3] if func in ADDED_PRODUCTS else args[:2]
    if func in REVERSED_PRODUCTS:
        left, right = right, left
    values = right if left is weights else left
    n = weights.ndim
    if min(n, values.ndim) < 2 or isinstance(values, nn.Parameter):
        return None
    last = (n - 2, n - 1) if left is weights else (n - 1, n - 2)
    # Two axes without a batch are one head of attention only if every token asks.
    if n == 2 and weights.shape[0] != weights.shape[1]:
        return None
    return (*range(n - 2), *last)


def _of_times(args: Arguments, weights: Tensor) -> Axes | None:
    """(…, Q, K, 1) times (…, 1, K, D), to be summed over K: a product written out."""
    values = args[1] if args[0] is weights else args[0]
    if not isinstance(values, Tensor) or isinstance(values, nn.Parameter):
        return None
    n = weights.ndim
    if n < 4 or weights.shape[-1] != 1 or values.ndim < 2 or values.shape[-1] == 1:
        return None
    own = values.ndim > 2 and values.shape[-3] != 1
    if own or values.shape[-2] != weights.shape[-2]:
        return None
    return (*range(n - 3), n - 1, n - 3, n - 2)


def _of_einsum(args: Arguments, weights: Tensor) -> Axes | None:
    equation, *operands = args
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    inputs, output = _letters(equation, [operand.ndim for operand in operands])
    mine = next(i for i, operand in enumerate(operands) if operand is weights)
    others = "".join(s for i, s in enumerate(inputs) if i != mine)
    if any(isinstance(o, nn.Parameter) for o in operands):
        return None
    return _einsum_axes(inputs[mine], others, output, weights)


def _einsum_axes(mine: str, others: str, output: str, weights: Tensor) -> Axes | None:
    keys = [c for c in mine if c not in output and c in others]
    asking = [c for c in mine if c in output and c not in others]
    if len(keys) != 1 or not asking:
        return None
    size = dict(zip(mine, weights.shape, strict=True))
    # Several heads may share one value head; then the queries are the axis that is as
    # long as the keys, or else the last.
    alike = [c for c in asking if size[c] == size[keys[0]]]
    query = alike[0] if len(alike) == 1 else asking[-1]
    rest = [c for c in mine if c not in (query, keys[0])]
    return tuple(mine.index(c) for c in (*rest, query, keys[0]))


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return each operand's letters and the output's, an ellipsis spelt out.

    >>> _letters("...qk,...kd->...qd", [4, 4])
    (['αβqk', 'αβkd'], 'αβqd')
    """
    left, arrow, output = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow:
        flat = left.replace(",", "").replace(".", "")
        output = "..." * ("..." in left)
        output += "".join(sorted(c for c in set(flat) if flat.count(c) == 1))
    hidden = [
        rank - len(operand.replace("...", ""))
        for operand, rank in zip(operands, ranks, strict=True)
    ]
    spelt = "αβγδεζηθ"[: max(hidden)]
    inputs = [
        operand.replace("...", spelt[len(spelt) - h :])
        for operand, h in zip(operands, hidden, strict=True)
    ]
    return inputs, output.replace("...", spelt)
