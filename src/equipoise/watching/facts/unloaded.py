"""Finds a state dict in memory that would fit a model, were its names not different.

``load_state_dict(state, strict=False)`` with a prefix too many loads nothing, without
a word. It leaves no trace in the model; but the state, where the program still has it,
fits the model name by name once the prefix is added, or taken off.
"""

import gc
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from equipoise.anatomy.sites import unwrapped

FITS = 0.9
"""Share of the model's parameters that must be there, each in its shape."""
COMPARED = 8
State = Mapping[str, Tensor]


def state_under_other_names(model: nn.Module) -> str | None:
    """Return the prefix by which a state's names differ; None if there is none.

    A state that holds the model's own numbers is none: a moving average begins as a
    copy. Where a state fits as it is, the program knows the names, and no other counts.
    """
    own = dict(unwrapped(model).named_parameters())
    if not own or not all(map(_is_plain, own.values())):
        return None
    found, places = None, {p.data_ptr() for p in own.values()}
    for state in _states(len(own)):
        if places.intersection(x.data_ptr() for x in state.values()):
            continue  # the model's own numbers, under whatever names
        if _fits(state, own, ""):
            return None
        prefix = _prefix(state, own)
        if prefix and _fits(state, own, prefix) and _differs(state, own, prefix):
            found = prefix
    return found


def _states(count: int) -> Iterator[State]:
    """Yield the dictionaries of tensors by name that are about as large as a model."""
    for found in gc.get_objects():
        if type(found) not in (dict, OrderedDict):
            continue
        if not FITS * count <= len(found) <= 2 * count + 8:
            continue
        pairs = found.items()
        if all(type(k) is str and _is_plain(x) for k, x in pairs):
            yield found


def _is_plain(x: object) -> bool:
    """Return whether it is a tensor with numbers of its own, in one piece."""
    if type(x) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(x, Tensor)
    return x.layout is torch.strided and not x.is_meta


def _prefix(state: State, own: State) -> str:
    """Return the part that its names have more; with ``-`` the part they lack."""
    name = next(iter(own))
    longer = (key for key in state if key.endswith(f".{name}"))
    if key := next(longer, ""):
        return key[: -len(name)]
    shorter = (key for key in state if name.endswith(f".{key}"))
    return f"-{name[: -len(key)]}" if (key := next(shorter, "")) else ""


def _renamed(name: str, prefix: str) -> str:
    return name.removeprefix(prefix[1:]) if prefix[:1] == "-" else f"{prefix}{name}"


def _fits(state: State, own: State, prefix: str) -> bool:
    """Return whether nearly all parameters are in a state, under these names."""
    pairs = ((p, state.get(_renamed(name, prefix))) for name, p in own.items())
    fits = sum(x is not None and x.shape == p.shape for p, x in pairs)
    return fits >= FITS * len(own)


def _differs(state: State, own: State, prefix: str) -> bool:
    """Return whether all matrices that are compared have other numbers."""
    every = ((p, state.get(_renamed(name, prefix))) for name, p in own.items())
    pairs = [(p, x) for p, x in every if x is not None and p.ndim > 1][:COMPARED]
    same = (torch.equal(p.cpu(), x.to("cpu", p.dtype)) for p, x in pairs)
    return bool(pairs) and not any(same)
