"""torch's functions by the part they play in attention written out by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]


def _both(*names: str) -> set[Function]:
    """Return the function and the method of each name, where they exist."""
    found = [getattr(home, n, None) for n in names for home in (torch, Tensor)]
    return {f for f in found if f is not None}


def _aten(*names: str) -> set[Function]:
    """Return torch's own operators of these names, and their overloads."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = (
        getattr(p, o) for p in packets for o in p.overloads() if "out" not in o
    )
    return {*packets, *overloads}


SOFTMAXES = {F.softmax, F.log_softmax, torch.special.softmax}
SOFTMAXES |= _both("softmax", "log_softmax") | _aten("softmax", "_softmax")
FUSED = {F.scaled_dot_product_attention} | _aten("scaled_dot_product_attention")
PRODUCTS = _both("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
PRODUCTS |= {torch.linalg.matmul, torch.baddbmm, Tensor.baddbmm}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
REVERSED_PRODUCTS = {Tensor.__rmatmul__}
EINSUM = torch.einsum
TIMES = _both("mul", "multiply")
# Applied to the weights, these are applied to the scores too: same elements, new axes.
RESHAPES = _both(
    *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze"),
    *("unsqueeze", "swapaxes", "swapdims", "movedim", "moveaxis", "contiguous"),
)
RESHAPES |= {Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]
# Parts of the weights: whoever mixes with a part speaks for the whole.
SLICES = _both("__getitem__", "chunk", "split", "unbind", "narrow", "select")
SLICES |= _both("tensor_split", "index_select")
# Lay windows of neighbours side by side, for each place anew: a convolution's work.
WINDOWS = {F.unfold, Tensor.unfold}
# Kernels that return no scores, and take their inputs in layouts of their own.
FOREIGN_KERNELS = (
    *("flash_attn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flash_api"),
    *("vllm_flash_attn", "xformers", "sageattention", "transformer_engine", "aiter"),
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
