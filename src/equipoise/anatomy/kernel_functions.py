"""Attention functions that no mode sees, wrapped while a pass is read.

Axes, in this file:  B batch · H head · S sequence · Q query · K key · D width.

Most kernels are torch operators, which a mode sees. FlashAttention 4, xFormers' and
SageAttention's functions, Transformer Engine's module and what Hugging Face's registry
calls are not: they are wrapped while a pass is read, wherever the model's own modules
hold them; if nothing inside was read, their arguments are.

``flex_attention`` is neither a torch function nor free of compiled code, so the mode
must not be active when it runs. torch looks ``setup_compilation_env`` up at each call;
while we read, ours is found there, which reads the caller's arguments and takes the
mode off.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall, Modify, Where
from equipoise.anatomy.fused_kernels import (
    Given,
    KernelRows,
    NotReadError,
    kernel_call,
    make_call,
    named_arguments,
)
from equipoise.anatomy.hooks import after, before, is_active, without_mode
from equipoise.anatomy.sites import Anatomy, named

Reader = Callable[[Caller, Given], AttentionCall]


def _sage(caller: Caller, given: Given) -> AttentionCall:
    """SageAttention: (B, H, S, D), or (B, S, H, D) as ``NHD``; causal from the left."""
    if given.get("tensor_layout", "HND") == "HND":
        turned = {name: given[name].transpose(1, 2) for name in "qkv"}
        given = {**given, **turned}
    if given.get("attn_mask") is not None:
        raise NotReadError("is called with a mask of its own (attn_mask)")
    _refuse_unaligned(given)
    return kernel_call(caller, given)


def _refuse_unaligned(given: Given) -> None:
    """Refuse a causal mask over other keys than queries: each aligns it in its way."""
    packed = given.get("starts_q") is not None  # lengths that may differ
    if given.get("causal") and (packed or given["q"].shape[1] != given["k"].shape[1]):
        raise NotReadError("is causal, with more keys than queries or fewer")


def _xformers(caller: Caller, given: Given) -> AttentionCall:
    """xFormers: (B, S, H, D), or (B, S, G, H, D); its other biases are written out."""
    given_qkv = (given[name] for name in "qkv")
    flat = (x[:, :, None] if x.ndim == 3 else x for x in given_qkv)
    q, k, v = (x.flatten(2, -2) for x in flat)
    scale, bias = given.get("scale"), given.get("attn_bias")
    places = _places(bias, square=q.shape[1] == k.shape[1])
    if places is not None:
        q, k, v = (x.flatten(0, 1) if "starts_q" in places else x for x in (q, k, v))
        return kernel_call(caller, {"q": q, "k": k, "v": v, "scale": scale, **places})
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads_first = [x.detach().transpose(1, 2) for x in (q, k, v)]
    mask = _written_out(bias, heads_first)
    return make_call(caller, heads_first, scale, KernelRows(), mask)


def _places(bias: Any, *, square: bool) -> Given | None:
    """Return a flash kernel's arguments for a bias that hides keys by place alone."""
    kind = type(bias).__name__
    infos: list[Any] = [getattr(bias, f"{x}_seqinfo", None) for x in "qk"]
    if kind == "LocalAttentionFromBottomRightMask":
        return {"left": bias.window_left, "right": bias.window_right}
    square = infos[0] is infos[1] and (bool(infos[0]) or square)
    if kind not in LOWER_RIGHT and not (kind in UPPER_LEFT and square):
        return None
    found: Given = {"causal": kind != "BlockDiagonalMask"}
    for x, info in zip("qk", infos if infos[0] else (), strict=False):
        found |= {f"starts_{x}": info.seqstart, f"longest_{x}": info.max_seqlen}
    return found


def _written_out(bias: Any, heads_first: list[Tensor]) -> Tensor | None:
    q_BHQD, k_BHKD, _ = heads_first
    if bias is None or isinstance(bias, Tensor):
        return bias
    if not hasattr(bias, "materialize"):
        raise NotReadError(f"is called with a bias of a kind of its own ({type(bias)})")
    shape = (*q_BHQD.shape[:3], k_BHKD.shape[2])
    written: Tensor = bias.materialize(shape, device=q_BHQD.device)
    return written.detach()


def _cute(caller: Caller, given: Given) -> AttentionCall:
    """FlashAttention 4: a window of (left, right), either of which may be None."""
    left, right = given.get("window_size") or (None, None)
    sides = {"left": -1 if left is None else left, "right": right}
    return kernel_call(caller, {**given, **sides, "window_size": None})


def _hugging_face(caller: Caller, given: Given) -> AttentionCall:
    """transformers' registry: (B, H, S, D), a mask of (B, S), documents by position."""
    module = given["module"]
    causal = given.get("causal")
    window = given.get("sliding_window")
    given = {
        **given,
        "causal": getattr(module, "is_causal", False) if causal is None else causal,
        "left": -1 if window is None else window - 1,
        "scale": given.get("scaling"),
        **{name: given[name].transpose(1, 2) for name in "qkv"},
    }
    if given.get("cu_seq_lens_q") is not None:
        packs = {name: given[name].flatten(0, 1) for name in "qkv"}
        starts = {f"starts_{x}": given[f"cu_seq_lens_{x}"] for x in "qk"}
        longest = {f"longest_{x}": given.get(f"max_length_{x}") for x in "qk"}
        return kernel_call(caller, {**given, **packs, **starts, **longest})
    return kernel_call(
        caller, given, real_BK=_real(given), document_T=_documents(given)
    )


def _real(given: Given) -> Tensor | None:
    mask = given.get("attention_mask")
    if mask is None:
        return None
    if mask.ndim != 2:
        raise NotReadError("is called with a mask that is not of (batch, key)")
    real: Tensor = mask.detach().bool()
    return real[:, -given["k"].shape[1] :]


def _documents(given: Given) -> Tensor | None:
    """Return the document of each token of a batch of one, by positions that restart.

    Where positions only go up by one there is one document: the same as None.
    """
    positions = given.get("position_ids")
    q, k = given["q"], given["k"]
    packed = isinstance(positions, Tensor) and positions.shape[-1] == q.shape[1]
    if not packed or q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        return None
    assert isinstance(positions, Tensor)
    at_T = positions.reshape(-1, q.shape[1])[0]
    return (at_T.diff(prepend=at_T[:1] - 1) != 1).cumsum(0)


def _transformer_engine(caller: Caller, given: Given) -> AttentionCall:
    """Transformer Engine's ``DotProductAttention``: (S, B, H, D), or as it says."""
    module = given["module"]
    layout = str(given.get("qkv_format") or getattr(module, "qkv_format", "sbhd"))
    kind = str(given.get("attn_mask_type") or getattr(module, "attn_mask_type", ""))
    _refuse_engine(module, given, layout, kind)
    order = {"sbhd": (1, 0, 2, 3), "bshd": (0, 1, 2, 3)}.get(layout, (0, 1, 2))
    window = given.get("window_size") or getattr(module, "window_size", None)
    packed = ("starts_q", "starts_k", "longest_q", "longest_k")
    given = {
        **{name: given[name].permute(order) for name in "qkv"},
        **{name: given.get(name) for name in packed if layout == "thd"},
        "causal": "causal" in kind,
        "scale": getattr(module, "softmax_scale", None),
        "window_size": window,
    }
    if layout != "thd" or given["starts_q"] is not given["starts_k"]:
        _refuse_unaligned(given)
    return kernel_call(caller, given)


def _refuse_engine(module: nn.Module, given: Given, layout: str, kind: str) -> None:
    vanilla = getattr(module, "softmax_type", "vanilla") == "vanilla"
    bias = given.get("core_attention_bias_type", "no_bias") == "no_bias"
    known = layout in {"sbhd", "bshd"} and kind in {"causal", "no_mask"}
    packed = layout == "thd" and kind in {"padding", "padding_causal"}
    known |= packed and given.get("cu_seqlens_q_padded") is None
    if not (vanilla and bias and known):
        raise NotReadError(f"is called with layout {layout} and mask {kind}")


# xFormers' biases that hide keys by place, by where their diagonal ends or starts.
LOWER_RIGHT = {"BlockDiagonalMask", "BlockDiagonalCausalFromBottomRightMask"}
LOWER_RIGHT |= {"LowerTriangularFromBottomRightMask"}
UPPER_LEFT = {"LowerTriangularMask", "BlockDiagonalCausalMask"}
# Where functions that no mode sees are defined, by package.
FUNCTIONS: dict[str, dict[str, Reader]] = {
    "sageattention": {"sageattn": _sage},
    "xformers.ops": {"memory_efficient_attention": _xformers},
    "mslk.attention.fmha": {"memory_efficient_attention": _xformers},
    "flash_attn.cute": {
        "flash_attn_func": _cute,
        "flash_attn_varlen_func": _cute,
    },
}
ENGINE = "transformer_engine"
REGISTRY = "transformers.modeling_utils"
FLASH = "transformers.integrations.flash_attention"


class KernelFunctions:
    """While installed, reads what no operator shows; calls of other threads are not."""

    def __init__(
        self,
        mode: TorchFunctionMode,
        anatomy: Anatomy,
        *,
        count: Callable[[], int],
        report: Callable[[str, Reader, Given], None],
    ) -> None:
        """``count`` says how many calls were read, ``report`` takes one more."""
        self._mode, self._anatomy = mode, anatomy
        self._count, self._report = count, report
        self.inside = 0
        """How many wrapped functions are running."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for home, name, function, reader in self._held_functions():
                setattr(home, name, self._wrapped(name, function, reader))
                stack.callback(setattr, home, name, function)
            for mapping, name, function in _registered():
                mapping[name] = self._wrapped(name, function, _hugging_face)
                stack.callback(mapping.__setitem__, name, function)
            for _, module in named(self._anatomy.model):
                if _is_engine(module):
                    self._wrap_module(module, stack)
            yield

    def _held_functions(self) -> Iterator[tuple[Any, str, Any, Reader]]:
        """Yield each function of a known package, everywhere the model holds it."""
        readers = {
            id(function): reader
            for package, known in FUNCTIONS.items()
            for name, reader in known.items()
            if (function := getattr(sys.modules.get(package), name, None)) is not None
        }
        for home in self._homes() if readers else ():
            for name, value in list(vars(home).items()):
                if id(value) in readers and callable(value):
                    yield home, name, value, readers[id(value)]

    def _homes(self) -> list[Any]:
        """Return the modules of code that the model's classes are written in."""
        classes = {type(module).__module__ for _, module in named(self._anatomy.model)}
        names = [*FUNCTIONS, "torch.nn.functional", *sorted(classes)]
        return [sys.modules[name] for name in names if name in sys.modules]

    def _wrapped(self, name: str, function: Any, reader: Reader) -> Any:
        names = tuple(inspect.signature(function).parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_active(self._mode):
                return function(*args, **kwargs)
            read = self._enter()
            try:
                out = function(*args, **kwargs)
            finally:
                self.inside -= 1
            if self._count() == read:
                self._report(name, reader, named_arguments(names, args, kwargs))
            return out

        return call

    def _enter(self) -> int:
        """Note that a wrapped function runs; return how many calls were read."""
        self.inside += 1
        return self._count()

    def _wrap_module(self, module: nn.Module, stack: ExitStack) -> None:
        names = tuple(inspect.signature(module.forward).parameters)
        read: list[int] = []

        def enter(_: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            read.append(self._enter())

        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.inside -= 1
            if self._count() == read.pop() and output is not None:
                given = named_arguments(names, args, {**kwargs, "module": module})
                self._report(type(module).__name__, _transformer_engine, given)

        stack.callback(before(module, enter).remove)
        left = after(module, leave, with_kwargs=True, always_call=True)
        stack.callback(left.remove)


def _is_engine(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith(ENGINE) and kind.__name__ == "DotProductAttention"


def _registered() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what transformers' registry calls for flash attention, under any name."""
    registry = getattr(sys.modules.get(REGISTRY), "ALL_ATTENTION_FUNCTIONS", None)
    flash = getattr(sys.modules.get(FLASH), "flash_attention_forward", None)
    for place in ("_global_mapping", "_local_mapping"):
        mapping = getattr(registry, place, {})
        for name, function in list(mapping.items()):
            if function is flash:
                yield mapping, name, function


FLEX = "torch.nn.attention.flex_attention"
SET_UP = "setup_compilation_env"
FLEX_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale")


@contextmanager
def flex_intercepted(
    mode: TorchFunctionMode, report: Callable[[Given], None]
) -> Iterator[None]:
    """While active, give every ``flex_attention`` call's arguments to ``report``."""
    flex = sys.modules.get(FLEX)
    set_up = getattr(flex, SET_UP, None)
    if flex is None or set_up is None:
        yield
        return

    @contextmanager
    def intercepting(given: Given) -> Iterator[Any]:
        with without_mode(mode):
            report(given)
            with set_up() as backend:
                yield backend

    def set_up_and_report() -> AbstractContextManager[Any]:
        if not is_active(mode):  # another thread's call
            alone: AbstractContextManager[Any] = set_up()
            return alone
        return intercepting(_flex_arguments(sys._getframe(1).f_locals))

    setattr(flex, SET_UP, set_up_and_report)
    try:
        yield
    finally:
        setattr(flex, SET_UP, set_up)


def _flex_arguments(values: Given) -> Given:
    given = {name: values.get(name) for name in FLEX_ARGUMENTS}
    if type(values) is dict:
        values.clear()  # a copy, which the frame would keep (see call_stack.py)
    return given


def flex_call(caller: Caller, given: Given) -> AttentionCall:
    """Return the call, with the user's own functions to change its scores."""
    modify = _modify(given["score_mod"], given["block_mask"].mask_mod)
    return AttentionCall(
        module=caller.module,
        kind="flex",
        q_BHQD=given["query"],
        k_BGKD=given["key"],
        v_BGKD=given["value"],
        scale=given["scale"],
        modify=modify,
        cross=caller.cross,
    )


def _modify(score_mod: Any, mask_mod: Any) -> Modify:
    # Lets a user's function index tensors by tensors under vmap. A caller of
    # flex_attention has loaded it already; no other model should wait for it.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    score_BHQK = _over_all(score_mod, with_score=True)
    visible_BHQK = _over_all(mask_mod, with_score=False)

    def modify(scores_bhqK: Tensor, where: Where, i_q: Tensor) -> Tensor:
        device = scores_bhqK.device
        b, h, _, K = scores_bhqK.shape
        first = (where.sequences.start or 0, where.heads.start or 0)
        ends = zip(first, (b, h), strict=True)
        parts = (torch.arange(i, i + n, device=device) for i, n in ends)
        at = (*parts, i_q, torch.arange(K, device=device))
        with TransformGetItemToIndex():
            changed = score_BHQK(scores_bhqK, *at)
            return torch.where(visible_BHQK(*at), changed, float("-inf"))

    return modify


def _over_all(function: Any, *, with_score: bool) -> Callable[..., Tensor]:
    """Return a function of scalar indices as one of whole axes B, H, Q and K."""
    for axis in (3, 2, 1, 0):
        indices = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(
            function, in_dims=((0, *indices) if with_score else indices)
        )
    whole: Callable[..., Tensor] = function
    return whole
