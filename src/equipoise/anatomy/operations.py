"""What each torch operation does to the numbers it reads: one table, shared by all.

Interception asks which operations move or mix softmax weights, the precision audit
which ones make a new number that is rounded, and the curvature audit which ones bend.
An operation has one role, found by its name; what is not in the table makes new
numbers, and may bend.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]


class Role(Enum):
    """What an operation does."""

    RESHAPE = "the same numbers on other axes"
    SLICE = "some of the numbers"
    COPY = "numbers repeated, joined, cast, put elsewhere, or constants"
    CHOICE = "each number one of those read, perhaps negated, or a constant"
    SUM = "linear in all it reads, or so almost everywhere"
    PRODUCT = "a product of matrices"
    TIMES = "a product number by number"
    QUOTIENT = "a quotient number by number"
    PROJECTION = "a product with a weight, and a bias"
    NORM = "a norm over features"
    ACTIVATION = "a smooth function of each number"
    SOFTMAX = "weights that sum to 1, or their logarithms"
    LOSS = "one number from predictions and targets"


# Names without underscores: relu_ and __getitem__ do what relu and getitem do.
_NAMES = {
    Role.RESHAPE: """
        view view_as reshape transpose permute t flatten unflatten ravel squeeze
        unsqueeze swapaxes swapdims movedim moveaxis contiguous""",
    Role.SLICE: """
        getitem chunk split unbind narrow select tensor_split index_select""",
    Role.COPY: """
        expand expand_as broadcast_to repeat repeat_interleave tile clone detach to
        float double half bfloat16 type type_as cpu cuda hsplit vsplit dsplit cat concat
        concatenate stack hstack vstack gather take take_along_dim setitem index_copy
        index_put scatter unfold roll flip rot90 pad tril triu diagonal diag diag_embed
        zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
        zero fill copy requires_grad get set as_strided deepcopy""",
    Role.CHOICE: """
        where masked_fill masked_select relu maximum minimum max min amax amin clamp abs
        neg sign topk sort dropout feature_dropout alpha_dropout max_pool1d max_pool2d
        adaptive_max_pool1d adaptive_max_pool2d nan_to_num""",
    Role.SUM: """
        add sub radd rsub iadd isub sum mean cumsum index_add embedding leaky_relu
        rand_like register_hook""",
    Role.PRODUCT: "matmul rmatmul bmm mm baddbmm einsum",
    Role.TIMES: "mul multiply rmul imul",
    Role.QUOTIENT: "div divide truediv true_divide",
    Role.PROJECTION: "linear addmm conv1d conv2d",
    Role.NORM: "layer_norm rms_norm group_norm batch_norm",
    Role.ACTIVATION: "gelu silu tanh sigmoid softplus",
    Role.SOFTMAX: "softmax log_softmax",
    Role.LOSS: "cross_entropy mse_loss nll_loss",
}
TABLE = {name: role for role, names in _NAMES.items() for name in names.split()}
MOVES = {Role.RESHAPE, Role.SLICE, Role.COPY, Role.CHOICE}
BILINEAR = {Role.PRODUCT, Role.TIMES, Role.PROJECTION}
KINDS = {
    Role.NORM: "norm",
    Role.ACTIVATION: "activation",
    Role.PROJECTION: "projection",
    Role.PRODUCT: "product",
    Role.TIMES: "product",
    Role.QUOTIENT: "product",
    Role.LOSS: "loss",
}


def name_of(func: Function) -> str:
    """Return an operation's name without underscores: of ``add_`` it is ``add``."""
    return getattr(func, "__name__", "").strip("_")


def role_of(func: Function) -> Role | None:
    """Return what an operation does, or None where the table does not say."""
    return TABLE.get(name_of(func))


def moves(func: Function) -> bool:
    """Return whether an operation returns only numbers that were there before.

    >>> moves(Tensor.view), moves(torch.relu_), moves(torch.add)
    (True, True, False)
    """
    return role_of(func) in MOVES


def bends(func: Function) -> bool:
    """Return whether an operation may have a second derivative.

    Not a matter of truth but of cost: what is not in the table is differentiated, and
    found to be zero.
    """
    return role_of(func) not in {*MOVES, Role.SUM}


def writes(func: Function) -> bool:
    """Return whether an operation changes what it reads.

    >>> writes(Tensor.mul_), writes(Tensor.__imul__), writes(Tensor.__mul__)
    (True, True, False)
    """
    name = func.__name__
    dunder = name.startswith(("__i", "__set"))
    return dunder or (name.endswith("_") and not name.startswith("_"))


def leaves(value: Any) -> list[Any]:
    """Return everything in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


def mapped(
    value: Any, change: Callable[..., Tensor], kind: type[Tensor] = Tensor
) -> Any:
    """Change the floating tensors of a kind in nested tuples, lists, dictionaries."""
    if isinstance(value, kind):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list) or type(value).__module__ == "torch.return_types":
        return type(value)(mapped(item, change, kind) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change, kind) for key, item in value.items()}
    return value


def linear_in_one(func: Function, place: int) -> bool:
    """Return whether an operation is linear in one tensor while the others stay."""
    role = role_of(func)
    return role in BILINEAR or (role is Role.QUOTIENT and place == 0)


def kind_of(func: Function) -> str:
    """Return the word under which an operation is counted: its role's, or its name."""
    name = name_of(func)
    return KINDS.get(TABLE[name], name) if name in TABLE else name


def _functions(*roles: Role) -> set[Function]:
    """Return the functions and methods of some roles; none that writes to its input."""
    names = [name for name, role in TABLE.items() if role in roles]
    spelt = [word for name in names for word in (name, f"__{name}__")]
    homes = (torch, Tensor, F, torch.special, torch.linalg)
    found = [getattr(home, word, None) for word in spelt for home in homes]
    return {f for f in found if callable(f) and not writes(f)}


def _aten(*names: str) -> set[Function]:
    """Return torch's own operators of these names, and their overloads."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = (
        getattr(p, o) for p in packets for o in p.overloads() if "out" not in o
    )
    return {*packets, *overloads}


SOFTMAXES = _functions(Role.SOFTMAX) | _aten("softmax", "_softmax")
LOG_SOFTMAXES = {f for f in SOFTMAXES if name_of(f) == "log_softmax"}
FUSED = {F.scaled_dot_product_attention} | _aten("scaled_dot_product_attention")
EINSUM = torch.einsum
PRODUCTS = _functions(Role.PRODUCT) - {EINSUM}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
REVERSED_PRODUCTS = {Tensor.__rmatmul__}
TIMES = _functions(Role.TIMES)
# Applied to the weights, these are applied to the scores too: same elements, new axes.
RESHAPES = _functions(Role.RESHAPE)
RESHAPES |= {Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]
# Parts of the weights: a product with a part stands for the full weights.
SLICES = _functions(Role.SLICE)
# Lay windows of neighbours side by side, for each place anew: a convolution's work.
WINDOWS = {F.unfold, Tensor.unfold}
# Kernels that return no scores, and take their inputs in layouts of their own.
FOREIGN_KERNELS = (
    *("flash_attn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flash_api"),
    *("vllm_flash_attn", "xformers", "sageattention", "transformer_engine", "aiter"),
    *("xformers_flash", "mslk_flash", "torch_attn"),
)


def foreign_kernel(func: Function) -> str:
    """Return the name of a fused attention kernel from outside torch, or nothing.

    >>> foreign_kernel(torch.ops.aten.relu.default), foreign_kernel(torch.relu)
    ('', '')
    """
    if not isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ""
    name = str(func)
    return name if name.startswith(tuple(f"{k}." for k in FOREIGN_KERNELS)) else ""
