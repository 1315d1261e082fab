"""Gradients and updates module by module: who is throttled, and who is left free.

Watch reads a block as a whole; which projection inside it starves is asked here, by
the trainer itself, so an unwatched run can answer too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Part of a parameter's name → the role it plays; the first that fits.
ROLES = (
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "o"),
    ("norm", "norm"),
    ("feedforward", "feedforward"),
    ("embedding", "embedding"),
)
ATTENTION = ("q", "k", "v", "o")
_BLOCK = re.compile(r"blocks\.(\d+)\.")


class PartNorms:
    """‖gradient‖ before clipping and ‖change‖ of each role in each block.

    >>> layer = nn.ModuleDict({"q_proj": nn.Linear(2, 2, bias=False)})
    >>> parts = PartNorms(layer, every=1)
    >>> layer["q_proj"].weight.grad = torch.ones(2, 2)
    >>> parts.before(0); parts.gradients(); parts.after()
    >>> parts.state()["gradient"], parts.state()["update"]
    ({'q': [2.0]}, {'q': [0.0]})
    """

    def __init__(self, model: nn.Module, *, every: int) -> None:
        self.every, self.steps = every, list[int]()
        self.named = [(site(n), p) for n, p in model.named_parameters()]
        self.found: dict[str, dict[str, list[float]]] = {"gradient": {}, "update": {}}
        self._before: list[Tensor] | None = None

    def before(self, step: int) -> None:
        """Remember the weights if this step is one to measure."""
        if not self.every or step % self.every:
            return
        self.steps.append(step)
        self._before = [p.detach().clone() for _, p in self.named]

    def gradients(self) -> None:
        """Read gradients: unscaled, not yet clipped."""
        if self._before is not None:
            held = [(s, p.grad) for s, p in self.named if p.grad is not None]
            self._keep("gradient", held)

    def after(self) -> None:
        """Read how far the optimiser moved each part."""
        if self._before is None:
            return
        old, self._before = self._before, None
        moved = [
            (where, p.detach() - was)
            for (where, p), was in zip(self.named, old, strict=True)
        ]
        self._keep("update", moved)

    def _keep(self, kind: str, tensors: list[tuple[str, Tensor]]) -> None:
        for where, norm in norms(tensors):
            self.found[kind].setdefault(where, []).append(norm)

    def state(self) -> dict[str, Any]:
        """Return what was read, for a checkpoint or a result."""
        return {"steps": self.steps, **self.found}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])
        self.found = {kind: dict(state[kind]) for kind in self.found}


def site(name: str) -> str:
    """Return where a parameter is counted: ``3.q`` in block 3, a role outside.

    >>> site("blocks.3.attention.q_proj.weight"), site("final_norm.bias")
    ('3.q', 'norm')
    """
    role = next((role for part, role in ROLES if part in name), "other")
    block = _BLOCK.search(name)
    return f"{block[1]}.{role}" if block else role


def norms(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, float]]:
    """Yield each site's norm over all of its tensors, shards put together."""
    from equipoise.lab.trainer import whole

    grouped: dict[str, list[Tensor]] = {}
    for where, tensor in tensors:
        size = whole(torch.linalg.vector_norm(tensor.float()))
        grouped.setdefault(where, []).append(size)
    for where, sizes in grouped.items():
        yield where, torch.linalg.vector_norm(torch.stack(sizes)).item()
