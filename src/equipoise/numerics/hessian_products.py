"""Products with the second derivative of a scalar function, by double backward.

Axes, in this file:  N all parameters, flat.

Plain double backward is the mode that is right everywhere: ``torch.func``'s nested
transforms silently corrupt second derivatives of ``F.layer_norm``. The graph of the
gradient may be kept: a product then costs two thirds of one made from scratch, and
memory is that of one function. Several functions (micro-batches) are summed one after
the other, so memory is that of the largest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.errors import InputError

Function = Callable[[Sequence[Tensor]], Tensor]
"""Parameters → a scalar."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A scalar function in two parts, as Gauss–Newton needs it: loss(outputs(w))."""

    outputs: Function
    loss: Callable[[Tensor], Tensor]

    def __call__(self, parameters: Sequence[Tensor]) -> Tensor:
        return self.loss(self.outputs(parameters))


@dataclass(slots=True)
class HessianProduct:
    """v ↦ Σ ∇²f·v at a point; differentiates the gradient along v.

    Assumes f twice differentiable there: a kink of ReLU contributes nothing.

    Example:
        >>> w = torch.tensor([1.0, 2.0])
        >>> HessianProduct([lambda p: (p[0] ** 3).sum()], [w])(torch.ones(2))
        tensor([ 6., 12.])
    """

    functions: Sequence[Function]
    at: Sequence[Tensor]
    keep: bool | None = None
    """Keep the graph between products; by default where there is one function."""
    _graph: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.at = leaves(self.at)
        self.keep = len(self.functions) == 1 if self.keep is None else self.keep

    def __call__(self, v_N: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        parts, total_N = unflattened(v_N.detach(), self.at), torch.zeros_like(v_N)
        for gradient in self._gradients():
            total_N += self._along(gradient, parts)
        return total_N

    def _gradients(self) -> Iterator[list[Tensor]]:
        if self._graph:
            yield self._graph
            return
        for function in self.functions:
            gradient = slope(function, self.at, differentiable=True)
            if self.keep and len(self.functions) == 1:
                self._graph = gradient
            yield gradient

    def _along(self, gradient: list[Tensor], parts: list[Tensor]) -> Tensor:
        curved = [i for i, g in enumerate(gradient) if g.requires_grad]
        if not curved:
            return torch.cat([torch.zeros_like(part).flatten() for part in parts])
        found = torch.autograd.grad(
            [gradient[i] for i in curved],
            self.at,
            [parts[i] for i in curved],
            retain_graph=bool(self._graph),
            materialize_grads=True,
        )
        return flattened(found)


@dataclass(slots=True)
class GaussNewtonProduct:
    """v ↦ Σ Jᵀ(∇²ℓ)J·v: the Hessian without the curvature of the network itself.

    Positive semi-definite where ℓ is convex in the outputs. Jv is the derivative of
    u ↦ Jᵀu, which is linear, so any model that can be differentiated twice will do.

    Example:
        >>> square = Composite(lambda p: p[0] ** 2, lambda z: z.sum() ** 2)
        >>> GaussNewtonProduct([square], [torch.tensor([3.0])])(torch.ones(1))
        tensor([72.])
    """

    functions: Sequence[Composite]
    at: Sequence[Tensor]
    keep: bool | None = None
    _graph: list["_Linearised"] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.at = leaves(self.at)
        self.keep = len(self.functions) == 1 if self.keep is None else self.keep

    def __call__(self, v_N: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        parts, total_N = unflattened(v_N.detach(), self.at), torch.zeros_like(v_N)
        for linear in self._graph or map(self._linearised, self.functions):
            total_N += linear.product(parts, self.at)
            if self.keep and len(self.functions) == 1:
                self._graph = [linear]
        return total_N

    @torch.enable_grad()
    def _linearised(self, function: Composite) -> "_Linearised":
        z = function.outputs(self.at)
        _depends(z)
        u = torch.zeros_like(z, requires_grad=True)
        pulled = torch.autograd.grad(
            z, self.at, u, create_graph=True, materialize_grads=True
        )
        top = z.detach().requires_grad_()
        slope = torch.autograd.grad(function.loss(top), top, create_graph=True)[0]
        return _Linearised(z, u, list(pulled), top, slope)


@dataclass(frozen=True, slots=True)
class _Linearised:
    z: Tensor
    u: Tensor
    pulled: list[Tensor]
    """Jᵀu, with its graph in u."""
    top: Tensor
    slope: Tensor
    """∂ℓ/∂z at ``top``, with its graph."""

    def product(self, parts: list[Tensor], at: Sequence[Tensor]) -> Tensor:
        used = [i for i, p in enumerate(self.pulled) if p.requires_grad]
        (pushed,) = torch.autograd.grad(
            [self.pulled[i] for i in used],
            self.u,
            [parts[i] for i in used],
            retain_graph=True,
        )
        if not self.slope.requires_grad:  # a loss that is linear in the outputs
            return torch.cat([torch.zeros_like(part).flatten() for part in parts])
        (curved,) = torch.autograd.grad(
            self.slope, self.top, pushed, retain_graph=True, materialize_grads=True
        )
        pulled = torch.autograd.grad(
            self.z, at, curved, retain_graph=True, materialize_grads=True
        )
        return flattened(pulled)


@torch.enable_grad()
def slope(
    function: Function, at: Sequence[Tensor], *, differentiable: bool = False
) -> list[Tensor]:
    """Return ∂f/∂w of each parameter."""
    at = at if differentiable else leaves(at)
    value = function(at)
    _depends(value)
    return list(
        torch.autograd.grad(
            value, at, create_graph=differentiable, materialize_grads=True
        )
    )


def _depends(value: Tensor) -> None:
    if not value.requires_grad:
        raise InputError(
            "the loss does not depend on these parameters: nothing to differentiate"
        )


def leaves(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the same numbers as leaves of their own; no ``.grad`` is touched."""
    return [p.detach().requires_grad_() for p in parameters]


def flattened(parts: Sequence[Tensor]) -> Tensor:
    """Return parameters as one vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def unflattened(v_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a vector as parameters: views, not copies."""
    sizes = [p.numel() for p in like]
    if v_N.ndim != 1 or v_N.numel() != sum(sizes):
        raise InputError(
            f"a vector of {sum(sizes)} entries is needed, got shape {tuple(v_N.shape)}"
        )
    return [part.view_as(p) for part, p in zip(v_N.split(sizes), like, strict=True)]
