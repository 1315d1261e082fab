"""Records of the remedies that are applied to a model while it is watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from equipoise.records import Applied
from equipoise.remedies.base import Undo, recording


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Notes:
    note: Callable[[Applied], None]
    step: Callable[[], int]

    def add(self, undo: Undo, undone: bool) -> None:
        self.note(
            Applied(
                step=self.step(),
                remedy=undo.name,
                undone=undone,
                details={**undo.details},
            )
        )


@contextmanager
def remedies_noted(
    model: nn.Module, note: Callable[[Applied], None], step: Callable[[], int]
) -> Iterator[None]:
    """Call ``note`` for every remedy that is applied or undone during the block."""
    notes = _Notes(note, step)
    with recording(model, notes.add):
        yield
