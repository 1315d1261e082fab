"""Σ r²g² of everything a forward pass stores, noted as gradients come past.

Axes, in this file: N tokens · K input features · M output features.

Every sum is over rows (tokens, queries), and an average needs few of them: of tensors
with more rows than asked for every n-th is read, counted from a random one, and the
scatter of the rows read gives the standard error of the sum. Weight gradients are not
formed: for W the sum is estimated from every n-th output feature, in the same way.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import EllipsisType

import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Storage
from equipoise.auditing.precision.lazy_product import WIDE, LazyProduct, sparse_product
from equipoise.auditing.precision.walk import LinearCall

SAMPLED_FEATURES = 32
CHUNK = 1 << 16
Index = tuple[EllipsisType | slice, ...]
Affine = tuple[Tensor, Tensor | None]
"""A weight and its bias."""
HEAD_KINDS = frozenset({"score", "prob", "mix"})


@dataclass(frozen=True, slots=True)
class ErrorTerm:
    """One sum, the variance of its estimate, and what each head adds to it."""

    total: float
    variance: float = 0.0
    by_head: Tensor | None = None


@dataclass(slots=True)
class ErrorTerms:
    """A visitor that starts a history where there is none, and notes Σ r²g²."""

    storage: Storage
    rng: torch.Generator
    sample: int | None = None
    """Rows read of each tensor; all when None."""
    sums: dict[str, dict[str, list[ErrorTerm]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    _leaves: dict[tuple[str, int], tuple[nn.Parameter, Tensor]] = field(
        default_factory=dict
    )

    def parameter(self, site: str, parameter: nn.Parameter) -> Tensor:
        key = (site, id(parameter))
        if key not in self._leaves:
            leaf = parameter.detach().requires_grad_()
            self._note(site, "weight", leaf)
            self._leaves[key] = (parameter, leaf)
        return self._leaves[key][1]

    def stored(self, site: str, kind: str, x: Tensor) -> Tensor:
        y = _with_history(x)
        if self.storage.stores(kind):
            self._note(site, kind, y)
        return y

    def operand(self, x: Tensor) -> Tensor:
        return x

    def rows(self, site: str, ids: Tensor, weight: nn.Parameter) -> Tensor:
        # A row used twice carries one residual, not two: gather from unique rows.
        unique, inverse = ids.unique(return_inverse=True)
        leaf = weight.detach()[unique].requires_grad_()
        self._note(site, "weight", leaf)
        return nn.functional.embedding(inverse, leaf)

    def linear(self, site: str, call: LinearCall) -> Tensor:
        weight_MK = call.oriented(call.weight.detach())
        bias_M = None if call.bias is None else call.bias.detach()
        affine = (weight_MK, bias_M)
        if len(weight_MK) < WIDE or not call.x.requires_grad:
            return self._product(site, call.x, affine)
        x = call.x.clone()  # as it is now, whatever is done to it in place
        return LazyProduct.of(
            x,
            len(weight_MK),
            made=lambda: self._wide(site, x, affine),
            some=lambda m: self._product(site, x, _picked(affine, m), of=weight_MK),
        )

    def _product(
        self, site: str, x: Tensor, affine: Affine, *, of: Tensor | None = None
    ) -> Tensor:
        """Return x·Wᵀ + b; ``of`` is the weight as stored, where W is part of it."""
        given = x.detach()
        y = self.stored(site, "product", nn.functional.linear(x, *affine))
        _on_gradient(y, lambda g: self._weigh(site, (given, g), affine, of=of))
        return y

    def _wide(self, site: str, x: Tensor, affine: Affine) -> Tensor:
        weight_MK, bias_M = affine
        given = x.detach()

        def on_gradient(g: Tensor, live_m: Tensor, weight_mK: Tensor) -> None:
            read = (value.index_select(-1, live_m), g[some])
            self._add(site, "product", read, scale=scale, entries=g.numel())
            bias_m = None if bias_M is None else bias_M[live_m]
            self._weigh(site, (given, g), (weight_mK, bias_m), of=weight_MK)

        y = sparse_product(x, weight_MK, bias_M, on_gradient=on_gradient)
        some, value, scale = self._kept(y)
        return y

    def _note(self, site: str, kind: str, x: Tensor) -> None:
        some, value, scale = self._kept(x)
        _on_gradient(
            x,
            lambda g: self._add(
                site, kind, (value, g[some]), scale=scale, entries=g.numel()
            ),
        )

    def _kept(self, x: Tensor) -> tuple[Index, Tensor, float]:
        """Return which rows of a tensor to read, those rows, and its scale."""
        some = self._rows(x)
        # A copy: a model may go on in place (x += y) before the gradient comes.
        return some, x.detach()[some].clone(), self._scale(x.detach())

    def _scale(self, x: Tensor) -> float:
        return self.storage.scale(x)

    def _rows(self, x: Tensor) -> Index:
        """Return an index of the rows to read of a tensor of this shape."""
        N = x.shape[-2] if x.dim() > 1 else 1
        step = 1 if self.sample is None else max(1, N // self.sample)
        if step == 1:
            return (...,)
        start = int(torch.randint(0, step, (), generator=self.rng))
        return (..., slice(start, None, step), slice(None))

    def _add(
        self,
        site: str,
        kind: str,
        read: tuple[Tensor, Tensor],
        *,
        scale: float,
        entries: int,
    ) -> None:
        """Note what was read of a stored tensor and of its gradient.

        ``scale`` is that of the whole tensor; ``entries`` how many the sum is over.
        """
        x, g = read
        parts = self._carried(x, g, scale)
        times = entries / max(1, x.numel())
        heads = kind in HEAD_KINDS and x.dim() == 4
        self.sums[site][kind].append(
            ErrorTerm(
                total=times * float(parts.sum()),
                variance=_variance(parts, times),
                by_head=times * parts.sum((0, 2)) if heads else None,
            )
        )

    def _weigh(
        self,
        site: str,
        flow: tuple[Tensor, Tensor],
        affine: Affine,
        *,
        of: Tensor | None = None,
    ) -> None:
        """Note what rounding a weight and its bias does, from x and the gradient.

        ``of`` is the weight as stored, where only some of its rows have a gradient.
        """
        (x, g), (weight_MK, bias_M) = flow, affine
        g_NM, x_NK = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
        M = weight_MK.shape[0]
        step = max(1, M // SAMPLED_FEATURES)
        start = int(torch.randint(0, step, (), generator=self.rng))
        # Layers that store W transposed would be read with a stride, time and again.
        some_mK = weight_MK[start::step].contiguous()
        g_mK = g_NM[:, start::step].mT @ x_NK
        self._add(
            site,
            "weight",
            (some_mK, g_mK),
            scale=self._scale(weight_MK if of is None else of),
            entries=weight_MK.numel(),
        )
        if bias_M is not None:
            read = (bias_M, g_NM.sum(0))
            self._add(
                site,
                "weight",
                read,
                scale=self._scale(bias_M),
                entries=bias_M.numel(),
            )

    def _carried(self, x: Tensor, g: Tensor, scale: float) -> Tensor:
        """Return Σ r²g² of each row; infinity (a logarithm of 0) has no residual."""
        found = self._residuals(x, g, scale)
        if math.isfinite(float(found.sum())):
            return found
        infinite = x.isinf()
        return self._residuals(
            x.masked_fill(infinite, 0.0), g.masked_fill(infinite, 0.0), scale
        )

    def _residuals(self, x: Tensor, g: Tensor, scale: float) -> Tensor:
        # A cache-sized piece at a time: three times as fast.
        rows = max(1, CHUNK // max(1, x.shape[-1]))
        pieces = zip(_split(x, rows), _split(g, rows), strict=True)
        found = []
        for some_x, some_g in pieces:
            r = self.storage.rounded_with(some_x, scale).sub_(some_x).mul_(some_g)
            found.append(torch.linalg.vecdot(r, r))
        return torch.cat(found).double().reshape(x.shape[:-1])


def _picked(affine: Affine, features_m: Tensor) -> Affine:
    weight_MK, bias_M = affine
    bias_m = None if bias_M is None else bias_M.index_select(0, features_m)
    return weight_MK.index_select(0, features_m), bias_m


def _split(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = x.reshape(-1, x.shape[-1]).split(rows)
    return pieces


def _with_history(x: Tensor) -> Tensor:
    # The first live tensors have no history: start one, safe for in-place calls.
    if not x.requires_grad:
        return x.detach().requires_grad_().clone()
    # Linear layers give views, and a view's hooks are lost when it is changed in place.
    y: Tensor = torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x
    return y


def _variance(parts: Tensor, times: float) -> float:
    """Return the variance of times·Σ parts when one in ``times`` was read."""
    n = parts.numel()
    if times <= 1 or n < 2:
        return 0.0
    return times**2 * n * float(parts.var()) * (1 - 1 / times)


def _on_gradient(x: Tensor, note: Callable[[Tensor], None]) -> None:
    def hook(g: Tensor) -> None:
        with torch.no_grad():
            note(g)

    x.register_hook(hook)
