"""Which torch calls make a new number, and which only move numbers about.

A result is rounded when it is stored. Calls in ``MOVES`` return numbers that were
already stored (slices, copies, maxima, a zero or the number itself), so nothing is
rounded there; every other call with a floating-point result rounds it once.
Fused attention is opened up: scores, probabilities and their product with the values
are three stored tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.anatomy.written_out import WrittenOut

MOVES = frozenset(
    """
    view view_as reshape transpose permute t swapaxes swapdims movedim moveaxis
    unsqueeze squeeze expand expand_as broadcast_to repeat repeat_interleave tile
    contiguous clone detach to float double half bfloat16 type type_as cpu cuda
    split chunk unbind tensor_split hsplit vsplit dsplit cat concat concatenate stack
    hstack vstack flatten unflatten ravel select narrow index_select gather take
    take_along_dim __getitem__ __setitem__ index_copy index_put index_put_ scatter
    scatter_ unfold roll flip rot90 pad where masked_fill masked_fill_ masked_select
    relu relu_ maximum minimum max min amax amin clamp clamp_ abs neg __neg__ sign
    topk sort tril triu diagonal diag diag_embed dropout dropout_ feature_dropout
    alpha_dropout zeros_like ones_like full_like empty_like new_zeros new_ones new_full
    new_empty zero_ fill_ copy_ requires_grad_ __get__ __set__ as_strided max_pool1d
    max_pool2d adaptive_max_pool1d adaptive_max_pool2d nan_to_num __deepcopy__
    """.split()
)
# Keys are hidden with numbers this large; they are markers, not activations.
HIDDEN = 1e30

Store = Callable[[str, Tensor], Tensor]


def moves(func: Callable[..., Any]) -> bool:
    """Return whether the call only moves numbers that are stored already."""
    return getattr(func, "__name__", "") in MOVES


def plain(x: Tensor) -> Tensor:
    """Return x with zeros for numbers that hide keys; x itself when there are none."""
    # Extremes first: a comparison of every number takes ten times as long.
    if not x.numel() or all(abs(float(end)) < HIDDEN for end in torch.aminmax(x)):
        return x
    return x.masked_fill(x.abs() >= HIDDEN, 0.0)


def opened_attention(store: Store, *args: Any, **kwargs: Any) -> Tensor:
    """Return scaled dot-product attention, storing scores, probabilities and mix.

    Same arguments as ``torch.nn.functional.scaled_dot_product_attention``.
    """
    attention = WrittenOut(
        scores=lambda q, k: store("score", q @ k),
        weigh=lambda z: store("prob", z.softmax(-1)),
        mix=lambda a, v: store("mix", a @ v),
    )
    return attention(*args, **kwargs)
