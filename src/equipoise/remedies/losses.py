"""Losses added where logits are made: z-loss, router z-loss, load balance.

Axes, in this file:  x row of logits · V class · E expert.

The loop's own loss is not touched, and what it prints stays what it was: the gradient
of the extra loss is added to the logits' gradient on its way back. How much the loop's
loss weighs (a gradient scaler, accumulation, ignored tokens) is read from that gradient
itself: for cross-entropy it is w·(p - target) in every row, which gives w.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sites import unwrapped
from equipoise.errors import InputError
from equipoise.remedies.base import Changes, Positive, RecordedRemedy, Undo

HEADS = ("lm_head", "head", "classifier", "score", "fc", "embed_out", "output")


def row_weights(g_xV: Tensor, p_xV: Tensor) -> Tensor:
    """Return how much each row counts in the loss: w of g = w(p - target).

    Where the target is nearly certain w cannot be read from its row; then the mean of
    the others is taken. Rows without gradient do not count.

    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> row_weights(0.1 * (p - torch.tensor([[0.0, 1.0, 0.0]])), p)
    tensor([0.1000])
    """
    up_x = g_xV.clamp(min=0).sum(-1)
    at_x = g_xV.argmin(-1, keepdim=True)
    left_x = 1 - p_xV.gather(-1, at_x).squeeze(-1)
    counts = up_x > 0
    clear = counts & (left_x > 1e-3)
    w_x = torch.where(clear, up_x / left_x.clamp(min=1e-3), 0.0)
    mean = w_x.sum() / clear.sum().clamp(min=1)
    return torch.where(counts & ~clear, mean, w_x)


@dataclass(slots=True)
class LossScale:
    """What the loop's loss weighs in this backward pass; logits come before routers."""

    value: float | Tensor = 1.0


@dataclass(slots=True)
class LogitHook:
    """Adds a z-loss's gradient to the output logits, and reads the loss's weight."""

    weight: float
    scale: LossScale = field(default_factory=LossScale)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = _logits(output)
        if logits.requires_grad:
            logits.register_hook(_AddZLoss(logits.detach(), self.weight, self.scale))


@dataclass(slots=True)
class _AddZLoss:
    logits: Tensor
    weight: float
    scale: LossScale

    def __call__(self, g_xV: Tensor) -> Tensor | None:
        z_xV = self.logits.float()
        p_xV = z_xV.softmax(-1)
        w_x = row_weights(g_xV.float(), p_xV)
        self.scale.value = w_x.sum()
        if not self.weight:
            return None
        lse_x = z_xV.logsumexp(-1)
        added = (2 * self.weight * w_x * lse_x)[..., None] * p_xV
        return g_xV + added.to(g_xV.dtype)


def _logits(output: Any) -> Tensor:
    if isinstance(output, tuple | list):
        output = output[0]
    return output if isinstance(output, Tensor) else output.logits


def output_module(model: nn.Module) -> nn.Module:
    """Return the module that returns the output logits: the head, or the model."""
    inner = unwrapped(model)
    of_hugging_face = getattr(inner, "get_output_embeddings", None)
    head = of_hugging_face() if of_hugging_face is not None else None
    if head is not None:
        return head  # type: ignore[no-any-return]
    children = dict(inner.named_children())
    named = (children[name] for name in HEADS if name in children)
    return next((m for m in named if isinstance(m, nn.Linear)), inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZLoss(RecordedRemedy):
    """Add weight·mean(log² Σ e^logit) to the loss (PaLM; Wortsman et al.)."""

    weight: Positive = 1e-4
    name: ClassVar[str] = "z_loss"

    def change(self, changes: Changes) -> Undo:
        head = output_module(changes.model)
        changes.hook(head.register_forward_hook(LogitHook(self.weight)))
        return changes.applied(weight=self.weight)


@dataclass(slots=True)
class RouterHook:
    """Adds the gradients of load-balance and router z-loss to a router's logits."""

    balance: float
    z: float
    chosen: int
    scale: LossScale
    guard: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple | list) else output
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits.register_hook(_AddRouterLoss(self, logits.detach()))


@dataclass(slots=True)
class _AddRouterLoss:
    options: RouterHook
    logits: Tensor

    def __call__(self, g_xE: Tensor) -> Tensor:
        z_xE = self.logits.float()
        balance_xE = balance_gradient(z_xE, self.options.chosen)
        if self.options.guard:
            g_xE = without_component(g_xE, balance_xE)
        added_xE = self.options.balance * balance_xE
        lse_x, p_xE = z_xE.logsumexp(-1, keepdim=True), z_xE.softmax(-1)
        rows = z_xE[..., 0].numel()
        added_xE = added_xE + self.options.z * 2 * lse_x * p_xE / rows
        return g_xE + (self.options.scale.value * added_xE).to(g_xE.dtype)


def without_component(g: Tensor, toward: Tensor) -> Tensor:
    """Return a gradient without what it has against a direction.

    >>> without_component(torch.tensor([3.0, -2.0]), torch.tensor([0.0, 1.0]))
    tensor([3., 0.])
    >>> without_component(torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0]))
    tensor([3., 2.])
    """
    wide, direction = g.float(), toward.float()
    size = direction.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    against = ((wide * direction).sum() / size).clamp(max=0.0)
    return (wide - against * direction).to(g.dtype)


def balance_gradient(z_xE: Tensor, chosen: int) -> Tensor:
    """Return the gradient of E·Σₑ (share of tokens)·(mean probability)."""
    E = z_xE.shape[-1]
    p_xE, rows = z_xE.softmax(-1), z_xE[..., 0].numel()
    picked = z_xE.topk(chosen, dim=-1).indices.flatten()
    share_E = torch.bincount(picked, minlength=E).to(z_xE) / picked.numel()
    mean_x1 = (p_xE * share_E).sum(-1, keepdim=True)
    return E / rows * p_xE * (share_E - mean_x1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance(RecordedRemedy):
    """Add load balance (Switch) and router z-loss (ST-MoE) to every router."""

    balance: float = 0.01
    z: float = 1e-3
    guard: bool = False
    """Remove from each router's gradient what drives its experts apart, such as a
    load-balance loss with the wrong sign, however large."""
    name: ClassVar[str] = "router_balance"

    def change(self, changes: Changes) -> Undo:
        routers = anatomy_of(changes.model).routers
        if not routers:
            raise InputError(
                f"{type(unwrapped(changes.model)).__name__} has no router we know: "
                "router_balance is for mixtures of experts (docs/families.md)"
            )
        scale = LossScale()
        head = output_module(changes.model)
        changes.hook(head.register_forward_hook(LogitHook(0.0, scale)))
        for router in routers.values():
            chosen = router.picks or 1
            hook = RouterHook(self.balance, self.z, chosen, scale, self.guard)
            changes.hook(router.module.register_forward_hook(hook))
        return changes.applied(routers=len(routers), balance=self.balance)
