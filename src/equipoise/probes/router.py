"""Mixture-of-experts routing: how undecided the router is, and whom it sends tokens to.

Axes, in this file:  N token · E expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.sites import Anatomy
from equipoise.probes.capture import Emit, Guarded


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """Emit the mean entropy of the router's choice and each expert's share."""

    name: str = "router"

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        for site, (module, top_k) in anatomy.routers.items():
            listen = guarded(partial(_listen, emit, site, top_k))
            yield hooks.after(module, listen)


def _listen(
    emit: Emit, site: str, top_k: int, module: nn.Module, args: Any, output: Any
) -> None:
    logits = output[0] if isinstance(output, tuple) else output
    logits_NE = logits.flatten(0, -2).to(torch.float32)
    emit(site, "router.entropy", router_entropy(logits_NE), how="mean")
    emit(site, "router.load", router_load(logits_NE, top_k=top_k), how="mean")


def router_entropy(logits_NE: Tensor) -> Tensor:
    """Return the mean over tokens of the entropy of softmax(logits), in nats."""
    log_p_NE = logits_NE.log_softmax(-1)
    return -(log_p_NE.exp() * log_p_NE).sum(-1).mean()


def router_load(logits_NE: Tensor, *, top_k: int) -> Tensor:
    """Return each expert's share of the N·k assignments; 1/E each when balanced."""
    chosen_Nk = logits_NE.topk(top_k, dim=-1).indices
    count_E = torch.zeros_like(logits_NE[0]).index_add_(
        0,
        chosen_Nk.flatten(),
        torch.ones_like(chosen_Nk.flatten(), dtype=torch.float32),
    )
    return count_E / chosen_Nk.numel()
