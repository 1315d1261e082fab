"""``flex_attention``: seen where it sets up its own compilation.

It is neither a torch function nor free of compiled code, so the mode must not be active
when it runs. torch looks ``setup_compilation_env`` up at each call; while we read, ours
is found there, which reads the caller's arguments and takes the mode off.

Axes, in this file:  B batch · H head · Q query · K key.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall, Modify
from equipoise.anatomy.hooks import is_active, without_mode

MODULE = "torch.nn.attention.flex_attention"
SET_UP = "setup_compilation_env"
ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale")
Given = dict[str, Any]


@contextmanager
def intercepted(
    mode: TorchFunctionMode, report: Callable[[Given], None]
) -> Iterator[None]:
    """While active, give every ``flex_attention`` call's arguments to ``report``."""
    flex = sys.modules.get(MODULE)
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
        return intercepting(_arguments(sys._getframe(1).f_locals))

    setattr(flex, SET_UP, set_up_and_report)
    try:
        yield
    finally:
        setattr(flex, SET_UP, set_up)


def _arguments(values: Given) -> Given:
    given = {name: values.get(name) for name in ARGUMENTS}
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

    def modify(scores_BHqK: Tensor, queries: slice) -> Tensor:
        device = scores_BHqK.device
        B, H, _, K = scores_BHqK.shape
        q = torch.arange(queries.start, queries.stop, device=device)
        at = (*(torch.arange(n, device=device) for n in (B, H)), q)
        at = (*at, torch.arange(K, device=device))
        with TransformGetItemToIndex():
            changed = score_BHQK(scores_BHqK, *at)
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
