"""Which module made a call, read from the Python call stack without any hook."""

import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn

# These compute weights for the module that called them; they are no attention.
TOOLS = (nn.Softmax, nn.Dropout, nn.Identity)
# Arguments that hold another sequence for the keys, as models name them.
OTHER_SEQUENCE = {
    *("key_value_states", "encoder_hidden_states", "context", "memory", "kv"),
    *("encoder_output", "encoder_out", "cross_states", "cross_attention_states"),
}
CROSS_WORDS = ("cross", "encdec", "encoder_attn", "encoder_attention", "multihead_attn")


@dataclass(frozen=True, slots=True)
class Caller:
    """The module a call belongs to, and whether its keys are of another sequence."""

    module: nn.Module | None = None
    name: str = ""
    cross: bool = False


def caller(names: Mapping[int, str], sites: Container[int] = ()) -> Caller:
    """Return the innermost module of this model whose code is running right now.

    Attention is often called from a plain function, or from a small module without
    weights, that the module with the projections calls: if one of ``sites`` is on the
    stack around the innermost module, the call is the site's.
    """
    inner: Caller | None = None
    cross = False
    for module, others in _modules_on_the_stack():
        if id(module) not in names or isinstance(module, TOOLS):
            continue
        cross = cross or others
        name = names[id(module)]
        found = Caller(module, name, cross or sounds_crossed(name, module))
        inner = inner or found
        if id(module) in sites:
            return found
        if name == "":
            break
    return inner or Caller()


def sounds_crossed(name: str, module: nn.Module) -> bool:
    """Return whether a module's own name or class says cross-attention."""
    last = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    return any(word in last for word in CROSS_WORDS)


def sounds_like_attention(module: nn.Module | None) -> bool:
    """Return whether a module's class is named like attention, whatever it computes.

    >>> sounds_like_attention(nn.MultiheadAttention(4, 1)), sounds_like_attention(None)
    (True, False)
    """
    name = "" if module is None else type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _modules_on_the_stack() -> Iterator[tuple[nn.Module, bool]]:
    """Yield (module, whether another sequence was given), innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        first = code.co_varnames[0] if code.co_argcount else "self"
        if code.co_argcount or "self" in code.co_freevars:
            yield from _module_of(frame, first)
        frame = frame.f_back


def _module_of(frame: FrameType, first: str) -> Iterator[tuple[nn.Module, bool]]:
    values = frame.f_locals
    owners = [values.get(first), values.get("self")]
    code = frame.f_code
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    others = any(isinstance(values.get(n), Tensor) for n in OTHER_SEQUENCE & {*named})
    if type(values) is dict:
        # Before Python 3.13 this is a copy that the frame keeps: it would hold the
        # model's tensors alive until the frame returns.
        values.clear()
    for owner in owners:
        if isinstance(owner, nn.Module):
            yield owner, others
            return
