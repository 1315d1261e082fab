"""Follow a forward pass call by call, and know which module made each call.

A ``Visitor`` sees every stored result and every parameter as it is read, named by the
innermost module at work, and returns what the model shall go on with. Nothing of the
model is changed: hooks and the mode live inside an ``ExitStack`` and leave with it.

Only numbers that depend on the data or on a parameter are visited. Tables made ahead
(masks, positions, rotary angles) stay wide, as mixed-precision code keeps them.

Which torch calls make a new number, and which only move numbers about.

A result is rounded when it is stored. Calls in ``MOVES`` return numbers that were
already stored (slices, copies, maxima, a zero or the number itself), so nothing is
rounded there; every other call with a floating-point result rounds it once.
Fused attention is opened up: scores, probabilities and their product with the values
are three stored tensors.

``torch.nn.functional.multi_head_attention_forward``, spelt out.

Axes, in this file: Q query · K key · B batch · C channel · H head · d head width.

torch's own runs as one call in which no stored tensor can be seen. This one makes the
same calls one by one; a walk sees the projections and opens the attention between.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.sdpa import WrittenOut
from equipoise.errors import InputError

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


def multihead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return torch's multi-head attention; weights are never returned.

    The parameters are those of the function it stands for, in its order.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn:
        raise InputError("attention with bias_k, bias_v or add_zero_attn is not opened")
    batched = query.dim() == 3
    inputs = [x if batched else x.unsqueeze(1) for x in (query, key, value)]
    weights = _weights(in_proj_weight, options)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        _by_head(F.linear(x, w, b), heads)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    y_BHQd = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_mask(options, q, k),
        dropout_p=dropout_p if options.get("training", True) else 0.0,
    )
    y_QBC = y_BHQd.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(y_QBC, out_proj_weight, out_proj_bias)
    return (out if batched else out.squeeze(1)), None


def _weights(together: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
    if together is not None and not options.get("use_separate_proj_weight"):
        return together.chunk(3)
    return tuple(options[f"{name}_proj_weight"] for name in "qkv")


def _by_head(x_NBC: Tensor, heads: int) -> Tensor:
    x_NBHd: Tensor = x_NBC.unflatten(-1, (heads, -1))
    return x_NBHd.permute(1, 2, 0, 3)


def _mask(options: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Return one additive mask over (B, H, Q, K) from the two torch knows."""
    masks = [_additive(options.get("attn_mask"), q), None]
    if masks[0] is not None and masks[0].dim() == 3:
        masks[0] = masks[0].unflatten(0, (q.shape[0], -1))
    padding = _additive(options.get("key_padding_mask"), q)
    if padding is not None:
        masks[1] = padding.reshape(-1, 1, 1, k.shape[-2])
    given = [mask for mask in masks if mask is not None]
    return None if not given else given[0] if len(given) == 1 else given[0] + given[1]


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


_LIVE = "_equipoise_live"


class Visitor(Protocol):
    """Sees what is stored; what it returns takes its place."""

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        """Return the parameter as the site shall read it."""
        ...

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        """Return a result as the site shall store it."""
        ...

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        """Return the rows of an embedding table, as the site shall store them."""
        ...

    def linear(self, site: str, call: "LinearCall") -> Tensor:
        """Return x·W + b as the site shall store it; W and b are still as given."""
        ...


class LinearCall:
    """A product with a weight matrix, whichever function spelt it."""

    def __init__(
        self,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        *,
        transposed: bool = False,
    ) -> None:
        self.x = x
        self.weight = weight
        self.bias = bias
        self.transposed = transposed

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight of this shape with one row per output feature."""
        return weight.mT if self.transposed else weight


@contextmanager
def walked(model: nn.Module, visitor: Visitor) -> Iterator[None]:
    """Visit everything the model computes inside the block."""
    stack: list[str] = []
    with ExitStack() as exits:
        for name, module in model.named_modules():
            enter, leave = _steps(stack, name)
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ):
                exits.callback(handle.remove)
        exits.enter_context(_Walk(stack, visitor))
        yield


def _steps(stack: list[str], name: str) -> tuple[Any, Any]:
    def enter(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not stack:  # the model's own input is data
            _enliven([args, dict(kwargs)])
        stack.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return enter, leave


class _Walk(TorchFunctionMode):
    def __init__(self, stack: list[str], visitor: Visitor) -> None:
        super().__init__()
        self.stack, self.visitor = stack, visitor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.stack:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multihead(*args, **kwargs)
        if not _is_live([args, kwargs]):
            return func(*args, **kwargs)
        return _enliven(self._result(func, args, kwargs))

    def _result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        site = self.stack[-1]
        call = _linear_call(func, args, kwargs)
        if call is not None:
            return self.visitor.linear(site, call)
        if func is F.scaled_dot_product_attention:
            return opened_attention(self._store(site), *args, **kwargs)
        if func is F.embedding and isinstance(args[1], nn.Parameter):
            return self.visitor.rows(site, args[0], args[1])
        args, kwargs = _replaced(
            [args, kwargs], lambda p: self.visitor.parameter(site, p)
        )
        result = func(*args, **kwargs)
        if moves(func):
            return result
        return _mapped(result, lambda x: self.visitor.stored(site, _kind(func), x))

    def _store(self, site: str) -> Callable[[str, Tensor], Tensor]:
        return lambda kind, x: self.visitor.stored(site, kind, x)


_KINDS = {"softmax": "prob", "layer_norm": "norm", "rms_norm": "norm"}


def _kind(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "result").strip("_")
    return _KINDS.get(name, name)


def _linear_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LinearCall | None:
    """Return the call if it is a product with a whole weight matrix of the model."""
    if func is F.linear and isinstance(
        args[1] if len(args) > 1 else None, nn.Parameter
    ):
        return LinearCall(
            args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        )
    if func is torch.addmm and len(args) == 3 and isinstance(args[2], nn.Parameter):
        scaled = bool(kwargs)  # alpha or beta: not a plain product
        return (
            None if scaled else LinearCall(args[1], args[2], args[0], transposed=True)
        )
    return None


def _mapped(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, Tensor):
        return change(result) if result.is_floating_point() else result
    if isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        return type(result)(_mapped(item, change) for item in result)
    return result


def _replaced(value: Any, change: Callable[[nn.Parameter], Tensor]) -> Any:
    if isinstance(value, nn.Parameter):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, change) for key, item in value.items()}
    return value


def _is_live(value: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, nn.Parameter) or hasattr(value, _LIVE)
    if isinstance(value, tuple | list):
        return any(_is_live(item) for item in value)
    return isinstance(value, dict) and any(_is_live(item) for item in value.values())


def _enliven(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        setattr(value, _LIVE, True)
    elif isinstance(value, tuple | list):
        for item in value:
            _enliven(item)
    elif isinstance(value, dict):
        for item in value.values():
            _enliven(item)
    return value
