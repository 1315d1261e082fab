"""Listening to the hidden states that modules are given."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import local_part
from equipoise.probes.capture import Guarded

Listen = Callable[[str, nn.Module, Tensor], None]
"""Called with the site, the module, and the hidden states (…, tokens, width)."""


def at_inputs(
    modules: Mapping[str, nn.Module], listen: Listen, guarded: Guarded
) -> Iterator[RemovableHandle]:
    """Yield one handle per module; each call of it hands its input to ``listen``."""
    for site, module in modules.items():
        yield hooks.before(module, guarded(partial(_called, listen, site)))


def _called(
    listen: Listen,
    site: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    # The interceptor would look at each of our own operations, attributes included.
    with torch._C.DisableTorchFunction():
        x = hidden_states(args, kwargs)
        if x is not None and x.numel():  # a batch without rows has nothing to say
            # A shard of the sequence: anything else of a DTensor would ask other ranks.
            listen(site, module, local_part(x))


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first floating tensor with a token axis among a call's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None
