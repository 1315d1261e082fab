"""``torch.nn``'s fused encoder in evaluation, read without disturbing it.

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

from equipoise.anatomy import listening, multihead
from equipoise.anatomy.callers import Caller, sounds_crossed
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.modes import step_aside, step_back
from equipoise.anatomy.names import named
from equipoise.anatomy.sites import Anatomy

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
                    stack.callback(listening.before(module, self._before).remove)
                    handle = listening.after(
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
            self._hear(multihead.from_module(self._caller(module), args, kwargs))
        elif isinstance(module, nn.TransformerEncoderLayer):
            inside = module.self_attn
            if id(inside) not in self._heard:
                given = _inside(module, args, kwargs)
                self._hear(multihead.from_module(self._caller(inside), (), given))
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
