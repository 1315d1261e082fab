"""Low-precision error by doing it: every stored tensor rounded, in float64.

Shares no formula with the predictors: it runs the head twice and subtracts.
"""

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.walk import LinearCall, walked
from equipoise.numerics.formats import Format
from equipoise.numerics.rounding import rounded

Head = tuple[Tensor, Tensor, Tensor, Tensor]


def head(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, visible: Tensor | None = None
) -> Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v @ w


def rounded_head(
    parts: Head, format: Format, *, visible: Tensor | None = None
) -> Tensor:
    """Return the head's output with every stored tensor rounded."""
    q, k, v, w = (rounded(x.double(), format) for x in parts)
    s = rounded(q @ k.mT / q.shape[-1] ** 0.5, format)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    p = rounded(s.softmax(-1), format)
    a = rounded(p @ v, format)
    return rounded(a @ w, format)


def measured_head_error(
    parts: Head, format: Format, *, visible: Tensor | None = None
) -> Tensor:
    """Return ‖fl(O) - O‖_F / ‖O‖_F of each head."""
    q, k, v, w = (x.double() for x in parts)
    exact = head(q, k, v, w, visible)
    error = rounded_head(parts, format, visible=visible) - exact
    return error.norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def carried_term(parts: Head, tensors: set[str], format: Format) -> Tensor:
    """Return ‖dO·r‖² for the rounding residuals r of some inputs, by autograd's jvp."""
    wide = tuple(x.double() for x in parts)
    names = ("query", "key", "value", "weight")
    tangents = tuple(
        rounded(x, format) - x if name in tensors else torch.zeros_like(x)
        for name, x in zip(names, wide, strict=True)
    )
    _, moved = torch.func.jvp(head, wide, tangents)
    return moved.square().sum()


def head_term(parts: Head, tensor: str, format: Format) -> Tensor:
    """Return Σ r(x)²‖∂O/∂x‖² over one stored tensor, by a dense autograd Jacobian."""
    q, k, v, w = (x.double() for x in parts)
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    a = s.softmax(-1) @ v
    ways = {
        "score": (s, lambda x: x.softmax(-1) @ v @ w),
        "mix": (a, lambda x: x @ w),
    }
    x, onward = ways[tensor]
    jacobian = torch.func.jacrev(onward)(x)
    sensitivity = jacobian.square().flatten(0, 1).sum(0)
    return ((rounded(x, format) - x).square() * sensitivity).sum()


class _Recorder:
    """Keeps every tensor a site stores, as a node of the graph, with its value."""

    def __init__(self, site: str) -> None:
        self.site, self.kept = site, []

    def _keep(self, site: str, x: Tensor) -> Tensor:
        y = x if x.requires_grad else x.detach().requires_grad_().clone()
        if site == self.site:
            self.kept.append(y)
        return y

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        if site == self.site and not any(parameter is x for x in self.kept):
            self.kept.append(parameter)
        return parameter

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        return self._keep(site, x)

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        return torch.nn.functional.embedding(ids, self.parameter(site, weight))

    def linear(self, site: str, call: LinearCall) -> Tensor:
        weight = call.oriented(self.parameter(site, call.weight))
        bias = call.bias
        if isinstance(bias, nn.Parameter):
            bias = self.parameter(site, bias)
        return self._keep(site, torch.nn.functional.linear(call.x, weight, bias))

    def operand(self, x: Tensor) -> Tensor:
        return x


def module_variance(
    model: nn.Module, batch: Tensor, site: str, storage: Storage
) -> float:
    """Return Σ r²‖∂Y/∂x‖²/‖Y‖² of one module: one backward pass per output entry.

    A weight used at two sites gets the gradient of both uses: give untied sites only.
    """
    recorder = _Recorder(site)
    with walked(model, recorder):
        y = model(batch)
    sensitivity = [torch.zeros_like(x) for x in recorder.kept]
    for entry in y.flatten():
        grads = torch.autograd.grad(
            entry, recorder.kept, retain_graph=True, allow_unused=True
        )
        for total, g in zip(sensitivity, grads, strict=True):
            if g is not None:
                total += g.square()
    total = sum(
        ((storage.rounded(x.detach()) - x.detach()).square() * s).sum().item()
        for x, s in zip(recorder.kept, sensitivity, strict=True)
    )
    return total / y.detach().square().sum().item()
