"""Does a trained model still select when the context grows? Loss, θ, selectivity.

Axes, in this file:  B batch · H head · Q query · K key · D head channel · T token.
The same targets are scored with 1, 2 and 4 times the training length in front of them,
so only the context differs. Positions must not end with training: rope or none.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import InputError
from equipoise.lab.data import DataOptions, open_data
from equipoise.lab.models import GPT, SelfAttention
from equipoise.lab.studies.judges import Trained
from equipoise.lab.studies.selection.normaliser_arms import seated
from equipoise.numerics.normalisers import rows
from equipoise.numerics.selection import Wanted, selection_of_heads

MULTIPLES = (1, 2, 4)
SEQUENCES = 48
"""Scored for the loss."""
READ = 4
"""Sequences whose rows are read."""
TOP = 8
"""Size of the selection whose separability is read."""
WANTED = Wanted(tops=(TOP,), random=4)
THETA_QUERIES = 4


def selection(trained: Trained) -> dict[str, float]:
    """Return each measure at 1×, 2× and 4× the training length, as ``loss_4x``."""
    model = trained.model
    if not isinstance(model, GPT) or model.config.positions not in {"rope", "none"}:
        raise InputError("contexts grow only where positions do not end: rope or none")
    L = model.config.context
    x_BT, y_BT = held_out(L * max(MULTIPLES))
    found: dict[str, float] = {}
    for times in MULTIPLES:
        longer = stretched(model, L * times)
        read = at_length(longer, x_BT[:, -L * times :], y_BT[:, -(L // 2) :])
        found |= {f"{name}_{times}x": value for name, value in read.items()}
    return found


def held_out(length: int) -> tuple[Tensor, Tensor]:
    """Return the same unseen sequences for every run."""
    data = open_data(DataOptions(), batch=SEQUENCES, seed=0, context=length)
    assert data.validation is not None
    x_BT, y_BT = data.validation.take()
    return x_BT, y_BT


def stretched(model: GPT, length: int) -> GPT:
    """Return the model with room for longer sequences, sharing its weights."""
    longer = copy.copy(model)
    longer.config = replace(model.config, context=length)
    return longer


@torch.no_grad()
def at_length(model: GPT, x_BT: Tensor, y_BT: Tensor) -> dict[str, float]:
    """Return the loss on the last targets, and how the last queries attend."""
    model.eval()
    logits = torch.cat([model(x)[:, -y_BT.shape[1] :] for x in x_BT.split(8)])
    loss = F.cross_entropy(logits.flatten(0, 1), y_BT.flatten()).item()
    layers = attended(model, x_BT[:READ], queries=y_BT.shape[1])
    model.train()
    names = layers[0]
    return {"loss": loss} | {
        name: math.fsum(layer[name] for layer in layers) / len(layers) for name in names
    }


def attended(model: nn.Module, x_BT: Tensor, *, queries: int) -> list[dict[str, float]]:
    """Return per attention layer the means over its last queries."""
    found: list[dict[str, float]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, args: found.append(layer(module, args[0], queries=queries))
        )
        for module in model.modules()
        if isinstance(module, SelfAttention)
    ]
    try:
        model(x_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found


def layer(module: SelfAttention, x_BTC: Tensor, *, queries: int) -> dict[str, float]:
    """Return what one layer's last queries do with what they see."""
    q_BHTD, k_BGTD, v_BGTD = module.projected(x_BTC)
    q_BHQD, rule = q_BHTD[:, :, -queries:], seated(module)
    read = selection_of_heads(
        q_BHQD,
        k_BGTD,
        v_BGTD,
        wanted=WANTED,
        causal=module.causal,
        scale=module.scale,
        normaliser=rule,
    )
    z_BHQK = _scores(q_BHQD[:, :, -THETA_QUERIES:], k_BGTD, module)
    given = rows(z_BHQK)
    w_BHQK, theta = rule.weights(given), rule.theta(given)
    size_BHQ1 = w_BHQK.abs().sum(-1, keepdim=True)
    share_BHQK = w_BHQK.abs() / size_BHQ1.clamp_min(1e-30)
    entropy = torch.special.entr(share_BHQK).sum(-1)
    heads: Mapping[str, Tensor] = read.per_head()
    return {
        "theta": (theta.lower.mean() + theta.upper.mean()).item() / 2,
        "theta_width": (theta.upper - theta.lower).mean().item(),
        "total": w_BHQK.sum(-1).mean().item(),
        "peak": share_BHQK.amax(-1).mean().item(),
        "keys": entropy.exp().mean().item(),
        "zeros": (share_BHQK[given.seen_xK] == 0).double().mean().item(),
        "rho": heads["rho"].mean().item(),
        **{name: heads[key].mean().item() for name, key in _NAMES.items()},
    }


_NAMES = {
    "recall": "euclidean.recall",
    "recall_random": "random_euclidean.recall",
    "cosine": "cosine.recall",
    "cosine_random": "random_cosine.recall",
    "distance": "distance.per_token",
}


def _scores(q_BHQD: Tensor, k_BGKD: Tensor, module: SelfAttention) -> Tensor:
    """Return scores of the last queries; hidden keys at -inf."""
    H, G, Q, K = q_BHQD.shape[1], k_BGKD.shape[1], q_BHQD.shape[2], k_BGKD.shape[2]
    z_BHQK = q_BHQD @ k_BGKD.repeat_interleave(H // G, 1).mT * module.scale
    after_QK = torch.ones(Q, K, dtype=torch.bool).triu(K - Q + 1)
    return z_BHQK.masked_fill(after_QK, -math.inf) if module.causal else z_BHQK
