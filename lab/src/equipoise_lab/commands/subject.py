"""Open a run of the laboratory, or its checkpoint, for commands of the instrument."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from equipoise_lab.data import Batch


def opened(path: Path) -> "tuple[nn.Module, Batch] | None":
    """Return the model and a batch it was not trained on; None of another folder."""
    if not is_run(path):
        return None
    # Here, not above: a folder of another kind must not load the laboratory.
    from equipoise_lab.running.execution import reopened

    return reopened(path)


def is_run(path: Path) -> bool:
    """Whether a folder is a run or a checkpoint inside one, told by its files alone."""
    return (path / "run.eqp").is_file() or (path / "state.json").is_file()
