"""The second derivative of each operation by name, from the closed forms.

A rule takes a ``Call`` and the cotangent λ at its output, and returns ∇²⟨λ, φ⟩·ż. What
has no rule here, or is called in a way its rule does not know, is differentiated twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.auditing.curvature.attribution_nodes import (
    OperationCall,
    Products,
    twice_differentiated,
)
from equipoise.theory.activations import derivatives
from equipoise.theory.curvature import softmax as closed_forms
from equipoise.theory.curvature.norm import norm_product

Rule = Callable[[OperationCall, Tensor], Products]


def _layer_norm(call: OperationCall, cotangent: Tensor) -> Products:
    given = _bound(_LAYER_NORM, call)
    return _norm(call, cotangent, given, eps=given["eps"], centred=True)


def _rms_norm(call: OperationCall, cotangent: Tensor) -> Products:
    given = _bound(_RMS_NORM, call)
    # What torch does when it is given none.
    smallest = torch.finfo(given["input"].dtype).eps
    eps = smallest if given["eps"] is None else given["eps"]
    return _norm(call, cotangent, given, eps=eps, centred=False)


def _norm(
    call: OperationCall,
    cotangent: Tensor,
    given: dict[str, Any],
    *,
    eps: float,
    centred: bool,
) -> Products:
    x, weight = given["input"], given["weight"]
    if len(given["normalized_shape"]) != 1:
        return twice_differentiated(call, cotangent)
    dx = call.tangent(x)
    found = norm_product(
        x,
        cotangent,
        torch.zeros_like(x) if dx is None else dx,
        gain_D=weight,
        dgain_D=call.tangent(weight),
        eps=eps,
        centred=centred,
    )
    return call.placed([(x, found.x_xD), (weight, found.gain_D)])


def _softmax(call: OperationCall, cotangent: Tensor) -> Products:
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    if not isinstance(dim, int) or call.kwargs.get("dtype") is not None:
        return twice_differentiated(call, cotangent)
    moved = (call.tensors[0].softmax(dim), cotangent, call.tangents[0])
    a, e, dt = (t.movedim(dim, -1) for t in moved)
    return (closed_forms.softmax_product(a, e, dt).movedim(-1, dim),)


def _activation(name: str) -> Rule:
    def rule(call: OperationCall, cotangent: Tensor) -> Products:
        second = derivatives(name, call.tensors[0]).second
        return (cotangent * second * call.tangents[0],)

    return rule


def _gelu(call: OperationCall, cotangent: Tensor) -> Products:
    form = "gelu_tanh" if call.kwargs.get("approximate") == "tanh" else "gelu"
    return _activation(form)(call, cotangent)


def _linear(call: OperationCall, cotangent: Tensor) -> Products:
    given = _bound(_LINEAR, call)
    x, weight = given["input"], given["weight"]
    dx, dweight = call.tangent(x), call.tangent(weight)
    if dx is None or dweight is None or x.ndim < 2:
        return twice_differentiated(call, cotangent)
    found = closed_forms.linear_product(cotangent, dx_xI=dx, dweight_OI=dweight)
    return call.placed([(x, found.x_xI), (weight, found.weight_OI)])


def _square(call: OperationCall, cotangent: Tensor) -> Products:
    return (
        closed_forms.squared_error_product(cotangent * call.tangents[0], entries=1),
    )


def _bilinear(call: OperationCall, cotangent: Tensor) -> Products:
    """Return the product of a map linear in each of two tensors."""
    if len(call.moving) != 2:
        return twice_differentiated(call, cotangent)
    with torch.enable_grad():
        at = [call.tensors[i].detach().requires_grad_() for i in call.moving]
        crossed = call.value([at[0], call.tangents[1]])
        crossed = crossed + call.value([call.tangents[0], at[1]])
        return torch.autograd.grad((crossed * cotangent).sum(), at)


def _cross_entropy(call: OperationCall, cotangent: Tensor) -> Products:
    given = _bound(_CROSS_ENTROPY, call)
    z, target = given["input"], given["target"]
    plain = given["weight"] is None and z.ndim == 2 and target.ndim == 1
    if not plain or given["reduction"] != "mean":
        return twice_differentiated(call, cotangent)
    seen_x = (target != given["ignore_index"]).to(z.dtype)
    weight_x = cotangent * seen_x / seen_x.sum()
    return (closed_forms.cross_entropy_product(z, call.tangents[0], weight_x=weight_x),)


def _bound(names: dict[str, Any], call: OperationCall) -> dict[str, Any]:
    """Return a call's arguments by name, defaults filled in."""
    return {**names, **dict(zip(names, call.args, strict=False)), **call.kwargs}


_LAYER_NORM: dict[str, Any] = {
    **dict.fromkeys(("input", "normalized_shape", "weight", "bias")),
    "eps": 1e-5,
}
_RMS_NORM = dict.fromkeys(("input", "normalized_shape", "weight", "eps"))
_LINEAR = dict.fromkeys(("input", "weight", "bias"))
_CROSS_ENTROPY: dict[str, Any] = {
    **dict.fromkeys(("input", "target", "weight", "size_average")),
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}

RULES: dict[str, Rule] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "gelu": _gelu,
    "silu": _activation("silu"),
    "tanh": _activation("tanh"),
    "square": _square,
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__", "mul", "__mul__"), _bilinear),
    "cross_entropy": _cross_entropy,
}


def rule_of(call: OperationCall) -> Rule:
    """Return the closed form of an operation, or plain double differentiation."""
    return RULES.get(call.func.__name__, twice_differentiated)
