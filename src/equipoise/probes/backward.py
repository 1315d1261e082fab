"""How a post-LN model's backward signal changes in each sublayer, and through what.

In a post-LN sublayer x' = LN(x + f(x)) the gradient g at x' first passes the norm,
r = J_LNᵀ g, then the branch, (I + J_f)ᵀ r: the gradient at the norm before.
Both factors are read from the gradients that autograd computes anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.protocols import Emit, Guarded


@dataclass(slots=True)
class BackwardFactors:
    """Emit ``backward.norm_factor`` and ``backward.branch_factor`` of each sublayer.

    Only where the norm closes a residual sum: in a pre-LN model the norm's input also
    feeds the identity path, and the two factors mean nothing.
    """

    name: str = "backward"
    _after_norm: dict[str, Tensor] = field(default_factory=dict)
    """Site → ‖r‖ of the sublayer that this norm closes; NaN where it is rounding."""
    _next: dict[str, str] = field(default_factory=dict)
    """Site → the norm that came after it in the forward pass."""
    _last: str | None = None

    def begin_pass(self) -> None:
        self._after_norm, self._next, self._last = {}, {}, None

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        if anatomy.placement != "post":
            return
        inside = tuple(f"{block}." for block in anatomy.blocks)
        for site, module in anatomy.norms.items():
            if site.startswith(inside):
                listen = guarded(partial(self._forward, emit, guarded, site))
                yield hooks.after(module, listen)

    def _forward(
        self,
        emit: Emit,
        guarded: Guarded,
        site: str,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        """Tensor hooks die with the graph: there is nothing to take off later."""
        made = output[0] if isinstance(output, tuple) else output
        if not args or not _differentiated(made) or not _differentiated(args[0]):
            return
        if self._last is not None:
            self._next[self._last] = site
        self._last = site
        seen: dict[str, Tensor] = {}
        at_output = partial(self._at_output, emit, site, seen)
        at_input = partial(self._at_input, emit, site, seen)
        made.register_hook(guarded(at_output))
        args[0].register_hook(guarded(at_input))

    def _at_output(
        self, emit: Emit, site: str, seen: dict[str, Tensor], g: Tensor
    ) -> None:
        seen["g"] = _norm(g)
        following = self._next.get(site)
        if following in self._after_norm:
            ratio = seen["g"] / self._after_norm[following]
            emit(following, "backward.branch_factor", ratio, how="mean")

    def _at_input(
        self, emit: Emit, site: str, seen: dict[str, Tensor], r: Tensor
    ) -> None:
        factor = _norm(r) / seen["g"]
        emit(site, "backward.norm_factor", factor, how="mean")
        # A gradient that the norm takes away (every entry alike) leaves rounding, and
        # a quotient by that would be decided by the last bit.
        rounding = 16 * torch.finfo(r.dtype).eps
        known = torch.where(factor > rounding, _norm(r), torch.nan)
        self._after_norm[site] = known


def _differentiated(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _norm(x: Tensor) -> Tensor:
    part = local_part(x)
    wide = torch.promote_types(part.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=wide)
    return norm
