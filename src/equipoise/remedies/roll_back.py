"""Go back to a checkpoint: weights, buffers and optimiser, not the data.

The batches that led away are not met again: a loop goes on with the next ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.anatomy.sites import unwrapped
from equipoise.errors import InputError
from equipoise.remedies.base import Changes, RecordedRemedy, Undo, same_bits


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of weights, buffers and optimiser state to go back to.

    >>> layer = nn.Linear(1, 1)
    >>> sorted(snapshot(layer, torch.optim.SGD(layer.parameters())))
    ['model', 'optimizer']
    """
    return {
        "model": _copied(unwrapped(model).state_dict()),
        "optimizer": _copied(optimizer.state_dict()),
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack(RecordedRemedy):
    """Load a checkpoint into the model and the optimiser that are being trained."""

    checkpoint: Mapping[str, Any] | str | Path | None = field(
        default=None, compare=False
    )
    """``{"model": …, "optimizer": …}``, or the file that ``torch.save`` wrote."""
    name: ClassVar[str] = "roll_back"
    preserves_function: ClassVar[bool] = False

    def change(self, changes: Changes) -> Undo:
        inner, step = unwrapped(changes.model), changes.required_optimizer
        given = self._opened()
        before = snapshot(inner, step)
        try:
            _load(inner, step, given)
        except InputError:
            _load(inner, step, before)  # half of it may be loaded
            raise
        after = {n: t.detach().clone() for n, t in _tensors(inner).items()}

        def back() -> None:
            now = _tensors(inner)
            if all(same_bits(local_part(now[n]), after[n]) for n in after):
                _load(inner, step, before)

        changes.undo_by(
            back, "state", "structure", *(id(p) for p in inner.parameters())
        )
        return changes.applied(tensors=len(after))

    def _opened(self) -> Mapping[str, Any]:
        given = self.checkpoint
        if isinstance(given, str | Path):
            if not Path(given).is_file():
                raise InputError(f"{given}: no such checkpoint to roll back to")
            given = torch.load(given, map_location="cpu", weights_only=True)
        if given is None or not {"model", "optimizer"} <= set(given):
            raise InputError(
                "roll_back needs a checkpoint with 'model' and 'optimizer': "
                'remedy("roll_back", checkpoint="last.pt"); snapshot(model, optimizer) '
                "of equipoise.remedies.roll_back makes one in memory"
            )
        return given


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: local_part(x.detach()) for name, x in state.items()}


def _load(model: nn.Module, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    try:
        model.load_state_dict(given["model"])
        optimizer.load_state_dict(_copied(given["optimizer"]))
    except (RuntimeError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"this checkpoint is not of this model and optimiser: {first}"
        ) from error
