"""The scores inside ``F.multi_head_attention_forward``, computed again from its inputs.

Axes, in this file:  B batch · H head · Q query · K key · D head width · E model width.
torch's function takes (Q, B, E) and projects inside, where no mode can see.

``torch.nn``'s fused encoder in evaluation, read without disturbing it.

In evaluation ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` take a fused
path, unless a torch-function mode is active or a module inside has a hook: either would
change the patient's bits. So the mode steps aside while they run, and their rows are
computed again from what went in.
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
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.hooks import step_aside, step_back
from equipoise.anatomy.sites import Anatomy
from equipoise.anatomy.wrappers import named

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
    query, key = given["query"], given["key"]
    unbatched = query.dim() == 2
    if unbatched:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
    q_BHQD, k_BHKD = _projected(query, key, given)
    k_BHKD, extra = _extended(k_BHKD, given)
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


def _projected(query: Tensor, key: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """Return q and k by head; only these two of the three maps are computed again."""
    E, H = query.shape[-1], given["num_heads"]
    if given.get("use_separate_proj_weight"):
        q_weight, k_weight = given["q_proj_weight"], given["k_proj_weight"]
    else:
        q_weight, k_weight, _ = given["in_proj_weight"].split(E)
    bias = given.get("in_proj_bias")
    q_bias, k_bias, _ = (None, None, None) if bias is None else bias.split(E)
    q_BHQD = _by_head(_linear(query, q_weight, q_bias), H)
    static: Tensor | None = given.get("static_k")
    if static is not None:
        return q_BHQD, static.unflatten(0, (-1, H))
    return q_BHQD, _by_head(_linear(key, k_weight, k_bias), H)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Under autocast the input may be narrower than the weight."""
    return F.linear(x.detach().to(weight.dtype), weight, bias)


def _by_head(x_TBE: Tensor, heads: int) -> Tensor:
    x_TBHD: Tensor = x_TBE.unflatten(-1, (heads, -1))
    return x_TBHD.permute(1, 2, 0, 3)


def _extended(k_BHKD: Tensor, given: Given) -> tuple[Tensor, int]:
    """Return the keys with ``bias_k`` and the zero key appended, and how many."""
    columns = []
    if (bias := given.get("bias_k")) is not None:
        one_1H1D = _by_head(bias, k_BHKD.shape[1])
        columns.append(one_1H1D.expand(k_BHKD.shape[0], -1, -1, -1))
    if given.get("add_zero_attn"):
        columns.append(torch.zeros_like(k_BHKD[:, :, :1]))
    return torch.cat([k_BHKD, *columns], 2) if columns else k_BHKD, len(columns)


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
        additive = _additive(attention)
        parts.append(
            additive.unflatten(0, tuple(BH)) if additive.ndim == 3 else additive
        )
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        parts.append(_additive(padding)[:, None, None])
    if not parts:
        return None
    mask = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return F.pad(mask, (0, extra)) if extra else mask


def _additive(mask: Tensor) -> Tensor:
    """torch's own convention here: True hides."""
    if mask.dtype != torch.bool:
        return mask.detach()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, float("-inf"))


Hear = Callable[[AttentionCall], None]


class FastPaths:
    """Steps a mode aside for the modules that may take a fused path."""

    def __init__(
        self, mode: TorchFunctionMode, anatomy: Anatomy, hear: Hear, *, guarded: Any
    ) -> None:
        self._mode, self._anatomy, self._hear = mode, anatomy, hear
        self._safely = guarded(self._recompute)
        self._aside: tuple[nn.Module, int] | None = None
        self._heard: set[int] = set()

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
        self._heard.discard(id(module))
        if self._aside is None and not module.training:
            self._aside = module, step_aside(self._mode)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        aside = self._aside is not None
        if self._aside is not None and self._aside[0] is module:
            self._back()
        if aside and output is not None:
            self._safely(module, args, kwargs)

    def _back(self) -> None:
        if self._aside is not None:
            step_back(self._mode, self._aside[1])
            self._aside = None

    def _recompute(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A layer speaks only for an attention module it did not call: a fused one."""
        if isinstance(module, nn.MultiheadAttention):
            self._heard.add(id(module))
            self._hear(from_module(self._caller(module), args, kwargs))
        elif isinstance(module, nn.TransformerEncoderLayer):
            inside = module.self_attn
            if id(inside) not in self._heard:
                given = _inside(module, args, kwargs)
                self._hear(from_module(self._caller(inside), (), given))
            self._heard.discard(id(inside))

    def _caller(self, module: nn.Module) -> Caller:
        name = self._anatomy.names.get(id(module), "")
        return Caller(module, name, sounds_crossed(name, module))


def _may_be_fused(module: nn.Module) -> bool:
    """A subclass with a forward of its own is somebody else's code, seen as it runs."""
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
