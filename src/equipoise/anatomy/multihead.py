"""``nn.MultiheadAttention`` read from what it was given, fused paths included.

Axes, in this file:  B batch · H head · Q query · K key · D head width · E model width.

``F.multi_head_attention_forward`` takes (Q, B, E) and projects inside, where no mode
can see; so its queries and keys are computed again, by a copy of torch's own code that
ends where attention begins.

In evaluation ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` take a fused
path, unless a torch-function mode is active or a module inside has a hook: either would
change the model's bits. So the mode is off while they run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from equipoise.anatomy import hooks
from equipoise.anatomy.call_stack import Caller, sounds_crossed
from equipoise.anatomy.calls import AttentionCall, additive
from equipoise.anatomy.hooks import pop_mode, push_mode
from equipoise.anatomy.sdpa import open_multi_head
from equipoise.anatomy.sites import Anatomy, named

# The order of the function's positional parameters, as documented.
PARAMETERS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads"),
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn"),
    *("dropout_p", "out_proj_weight", "out_proj_bias", "training"),
    *("key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v"),
    *("average_attn_weights", "is_causal"),
)
Given = dict[str, Any]


def from_function(
    caller: Caller, args: tuple[Any, ...], kwargs: Given
) -> AttentionCall:
    """Return the call that ``F.multi_head_attention_forward(*args, **kwargs)`` is."""
    given: Given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
    q_BHQD, k_BHKD = _queries_and_keys(given)
    extra = (given.get("bias_k") is not None) + bool(given.get("add_zero_attn"))
    return AttentionCall(
        module=caller.module,
        kind="mha",
        q_BHQD=q_BHQD,
        k_BGKD=k_BHKD,
        mask=_mask(given, q_BHQD.shape[:2], extra=extra),
        causal=_causal_without_mask(given),
        scale=q_BHQD.shape[-1] ** -0.5,
        cross=given["query"] is not given["key"] and caller.cross,
        extra_keys=extra,
        sinks=int(bool(given.get("add_zero_attn"))),
    )


def from_module(caller: Caller, args: tuple[Any, ...], kwargs: Given) -> AttentionCall:
    """Return the call that the caller's own module made, whichever path it took."""
    module = caller.module
    assert isinstance(module, nn.MultiheadAttention)
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    given: Given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = given["query"], given["key"]
    same = query is key
    if query.dim() == 3 and module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    inputs = {"query": query, "key": query if same else key, "is_causal": False}
    return from_function(caller, (), {**weights(module), **given, **inputs})


def weights(module: nn.MultiheadAttention) -> Given:
    """Return what a module passes to the function besides its inputs."""
    return {
        "num_heads": module.num_heads,
        "in_proj_weight": module.in_proj_weight,
        "in_proj_bias": module.in_proj_bias,
        "bias_k": module.bias_k,
        "add_zero_attn": module.add_zero_attn,
        "use_separate_proj_weight": not module._qkv_same_embed_dim,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
    }


class _QueriesAndKeysFound(Exception):  # noqa: N818
    """Ends torch's function where attention begins."""


def _queries_and_keys(given: Given) -> tuple[Tensor, Tensor]:
    """Return q and k by head, appended keys included; values are not computed."""
    instead = {
        "embed_dim_to_check": given["query"].shape[-1],
        # Keys stand for values, and the map after attention is never reached.
        "value": given["key"],
        "v_proj_weight": given.get("k_proj_weight"),
        "bias_v": given.get("bias_k"),
        "static_v": given.get("static_k"),
        **dict.fromkeys(("out_proj_weight", "out_proj_bias")),
        # Masks are read apart: torch's function would spread them over every head.
        **dict.fromkeys(("attn_mask", "key_padding_mask")),
        "need_weights": False,
        "is_causal": False,
        "dropout_p": 0.0,
    }
    function = open_multi_head(
        _in_projection_packed=_projected_packed,
        _in_projection=_projected,
        scaled_dot_product_attention=_interrupt,
    )
    try:
        with torch.no_grad():
            function(**{**given, **instead})
    except _QueriesAndKeysFound as found:
        q_BHQD, k_BHKD = found.args
        return q_BHQD, k_BHKD
    raise AssertionError("torch's multi-head attention called no attention")


def _interrupt(q_BHQD: Tensor, k_BHKD: Tensor, *others: Any) -> None:
    raise _QueriesAndKeysFound(q_BHQD, k_BHKD)


def _projected_packed(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return _projected(query, key, value, *weights, *biases)


def _projected(
    query: Tensor, key: Tensor, value: Tensor, *maps: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, and k again for v: two of the three maps are enough."""
    q_weight, k_weight, _, q_bias, k_bias, _ = maps
    k_KBE = _linear(key, k_weight, k_bias)
    return _linear(query, q_weight, q_bias), k_KBE, k_KBE


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Under autocast the input may be narrower than the weight."""
    return F.linear(x.detach().to(weight.dtype), weight, bias)


def _causal_without_mask(given: Given) -> bool:
    """torch drops the mask for the hint only where nothing else needs the mask."""
    hint: bool = given.get("is_causal", False) and given.get("attn_mask") is not None
    needs = given.get("key_padding_mask") is not None or given.get("need_weights", True)
    return hint and not needs


def _mask(given: Given, BH: tuple[int, ...], *, extra: int) -> Tensor | None:
    """Return both masks as one additive mask, or None; extra columns are visible."""
    parts = []
    attention, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if attention is not None and not _causal_without_mask(given):
        # (Q, K), or (B·H, Q, K)
        mask = additive(attention)
        parts.append(mask.unflatten(0, tuple(BH)) if mask.ndim == 3 else mask)
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        parts.append(additive(padding)[:, None, None])
    if not parts:
        return None
    mask = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return F.pad(mask, (0, extra)) if extra else mask


Report = Callable[[AttentionCall], None]


class FastPaths:
    """Takes a mode off while modules run that may take a fused path."""

    def __init__(
        self, mode: TorchFunctionMode, anatomy: Anatomy, report: Report, *, guarded: Any
    ) -> None:
        self._mode, self._anatomy, self._report = mode, anatomy, report
        self._safely = guarded(self._recompute)
        self._off: tuple[nn.Module, int] | None = None
        self._read: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._back)
            for _, module in named(self._anatomy.model):
                if _may_be_fused(module):
                    stack.callback(hooks.before(module, self._before).remove)
                    handle = hooks.after(
                        module, self._after, with_kwargs=True, always_call=True
                    )
                    stack.callback(handle.remove)
            yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._read.discard(id(module))
        if self._off is None and not module.training:
            self._off = module, pop_mode(self._mode)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        was_off = self._off is not None
        if self._off is not None and self._off[0] is module:
            self._back()
        if was_off and output is not None:
            self._safely(module, args, kwargs)

    def _back(self) -> None:
        if self._off is not None:
            push_mode(self._mode, self._off[1])
            self._off = None

    def _recompute(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Report a call; a layer's only if it did not call its attention: if fused."""
        if isinstance(module, nn.MultiheadAttention):
            self._read.add(id(module))
            self._report(from_module(self._caller(module), args, kwargs))
        elif isinstance(module, nn.TransformerEncoderLayer):
            inside = module.self_attn
            if id(inside) not in self._read:
                given = _inside(module, args, kwargs)
                self._report(from_module(self._caller(inside), (), given))
            self._read.discard(id(inside))

    def _caller(self, module: nn.Module) -> Caller:
        name = self._anatomy.names.get(id(module), "")
        return Caller(module, name, sounds_crossed(name, module))


def _may_be_fused(module: nn.Module) -> bool:
    """Return whether a module may be fused: not one with a forward of its own."""
    if isinstance(module, nn.TransformerEncoder):
        return module.use_nested_tensor and all(map(_may_be_fused, module.layers))
    fused = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return any(
        isinstance(module, c) and type(module).forward is c.forward for c in fused
    )


def _inside(
    layer: nn.TransformerEncoderLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the layer's attention was given inside the fused call."""
    names = ("src", "src_mask", "src_key_padding_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, padding = given["src"], given.get("src_key_padding_mask")
    if x.is_nested:
        x, padding = _padded(x)
    if layer.norm_first:
        norm = layer.norm1
        x = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    masks = {"attn_mask": given.get("src_mask"), "key_padding_mask": padding}
    return {"query": x, "key": x, "value": x, **masks}


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a nested batch with zeros after each end, and where those zeros are."""
    lengths_B = x._nested_tensor_size()[:, 0].to(x.device)
    padded_BTE = torch.nested.to_padded_tensor(x, 0.0)
    t_T = torch.arange(padded_BTE.shape[1], device=x.device)
    return padded_BTE, t_T[None] >= lengths_B[:, None]
