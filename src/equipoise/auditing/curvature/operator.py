"""The curvature of a loss at a model's weights, as an operator that is never formed.

Axes, in this file:  N all chosen parameters, flat, in the order of ``names``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from equipoise.anatomy.model_copy import ModelCopy
from equipoise.anatomy.sharding import is_sharded
from equipoise.auditing.curvature.objective import (
    Call,
    Loss,
    Options,
    mean_loss,
    prepared,
)
from equipoise.errors import InputError
from equipoise.numerics.hessian_products import (
    Composite,
    GaussNewtonProduct,
    HessianProduct,
    flattened,
    slope,
    unflattened,
)
from equipoise.probes.logits import output_logits

Kind = Literal["hessian", "gauss-newton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A symmetric operator on the parameters of a model."""

    names: tuple[str, ...]
    at: tuple[Tensor, ...]
    """The parameters themselves, in the dtype that products are made in."""
    matvec: Callable[[Tensor], Tensor]
    again: Callable[[Sequence[str]], "Operator"]
    """The same curvature over other parameters."""
    gradient: Callable[[], Tensor]
    """The gradient of the same loss, flat."""

    @property
    def width(self) -> int:
        return sum(p.numel() for p in self.at)

    @property
    def dtype(self) -> torch.dtype:
        return self.at[0].dtype

    def __call__(self, v_N: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        return self.matvec(v_N)

    def block(self, *patterns: str) -> "Operator":
        """Return the diagonal block of the parameters whose names match.

        ``block("blocks.0.*")`` is a layer, ``block("*.q_proj.weight")`` a group.
        """
        return self.again(matching(self.names, patterns))

    def split(self, v_N: Tensor) -> dict[str, Tensor]:
        """Return a vector as parameters, by name."""
        return dict(zip(self.names, unflattened(v_N, self.at), strict=True))

    def start(self, generator: torch.Generator) -> Tensor:
        """Return a random vector on the model's device."""
        device = self.at[0].device
        drawn_N = torch.randn(self.width, generator=generator, device=generator.device)
        return drawn_N.to(device=device, dtype=self.dtype)

    def dense(self) -> Float[Tensor, "N N"]:
        """Return the whole matrix, for small blocks: N products."""
        eye_NN = torch.eye(self.width, dtype=self.dtype, device=self.at[0].device)
        return torch.stack([self.matvec(e_N) for e_N in eye_NN])


def hessian(
    model: nn.Module,
    batch: Any,
    *,
    parameters: Iterable[str] = ("*",),
    **options: Unpack[Options],
) -> Operator:
    """Return ∇²L of a model's mean loss over a batch.

    The model is read in evaluation mode and left alone: a copy with the same weights
    is differentiated. Under DDP or FSDP2 every rank gives its own batch and gets the
    Hessian of the mean over ranks; all ranks must then make the same products.

    Args:
        model: Any PyTorch model.
        batch: (inputs, targets), keyword arguments, or tokens.
        parameters: Patterns of names; trainable ones that match are differentiated.
        options: ``loss`` ((output, targets) → mean; by default the model's own
            ``.loss``, else cross-entropy, or MSE for real targets), ``micro_batch``
            (samples at a time: memory is that of one such part, and each product then
            costs a forward and two backward passes of every part) and ``dtype`` (of
            the products; that of the model by default, float32 at least).

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> hessian(model, (x, torch.zeros(2, 1))).dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    return _operator("hessian", model, batch, tuple(parameters), options)


def gauss_newton(
    model: nn.Module,
    batch: Any,
    *,
    parameters: Iterable[str] = ("*",),
    **options: Unpack[Options],
) -> Operator:
    """Return Jᵀ(∇²ℓ)J: what of the Hessian remains where the network is linearised.

    Arguments as for :func:`hessian`; the loss must be a function of the model's
    logits (a model's own ``.loss`` cannot be taken apart: give targets).
    """
    return _operator("gauss-newton", model, batch, tuple(parameters), options)


def matching(names: Sequence[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names that match any of the patterns, in their own order."""
    patterns = tuple(patterns)
    found = tuple(name for name in names if any(fnmatchcase(name, p) for p in patterns))
    if not found:
        raise InputError(
            f"no trainable parameter matches {', '.join(patterns)}; there are "
            f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
        )
    return found


def _operator(
    kind: Kind,
    model: nn.Module,
    batch: Any,
    patterns: tuple[str, ...],
    options: Options,
) -> Operator:
    copied, parts, loss = prepared(model, batch, options)
    source = _Source(
        kind=kind,
        model_copy=copied,
        calls=parts,
        loss=loss,
        group=is_distributed(model),
    )
    return source.over(matching(copied.trainable, patterns))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Everything but the choice of parameters."""

    kind: Kind
    model_copy: ModelCopy
    calls: tuple[Call, ...]
    loss: Loss
    group: bool

    def over(self, names: Sequence[str]) -> Operator:
        at = tuple(self.model_copy.parameters[name] for name in names)
        product = self._product(tuple(names), at)
        return Operator(
            names=tuple(names),
            at=at,
            matvec=partial(averaged, product) if self.group else product,
            again=self.over,
            gradient=partial(self._gradient, tuple(names), at),
        )

    def _gradient(self, names: tuple[str, ...], at: tuple[Tensor, ...]) -> Tensor:
        total_N = sum(
            flattened(slope(partial(self._value, names, call), at))
            for call in self.calls
        )
        assert isinstance(total_N, Tensor)
        return averaged(lambda g_N: g_N, total_N) if self.group else total_N

    def _product(
        self, names: tuple[str, ...], at: tuple[Tensor, ...]
    ) -> Callable[[Tensor], Tensor]:
        if self.kind == "hessian":
            return HessianProduct(
                [partial(self._value, names, call) for call in self.calls], at
            )
        return GaussNewtonProduct(
            [
                Composite(
                    partial(self._logits, names, call), partial(self._above, call)
                )
                for call in self.calls
            ],
            at,
        )

    def _value(
        self, names: tuple[str, ...], call: Call, values: Sequence[Tensor]
    ) -> Tensor:
        output = self._output(names, call, values)
        return call.weight * self.loss(output, call.target)

    def _logits(
        self, names: tuple[str, ...], call: Call, values: Sequence[Tensor]
    ) -> Tensor:
        logits = output_logits(self._output(names, call, values))
        if logits is None or (call.target is None and self.loss is mean_loss):
            raise InputError(
                "Gauss–Newton needs logits and targets; this model keeps its loss to "
                "itself: give (inputs, targets)"
            )
        return logits

    def _above(self, call: Call, logits: Tensor) -> Tensor:
        return call.weight * self.loss(logits, call.target)

    def _output(
        self, names: tuple[str, ...], call: Call, values: Sequence[Tensor]
    ) -> Any:
        chosen = dict(zip(names, values, strict=True))
        return self.model_copy(chosen, call.args, call.kwargs)


def is_distributed(model: nn.Module) -> bool:
    """Say whether several ranks train this model on batches of their own."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    wrapped = type(model).__name__ == "DistributedDataParallel"
    return wrapped or any(is_sharded(p) for p in model.parameters())


def averaged(product: Callable[[Tensor], Tensor], v_N: Tensor) -> Tensor:
    """Return the mean over ranks, the same bits on each."""
    mine_N = product(v_N)
    dist.all_reduce(mine_N)
    return mine_N / dist.get_world_size()
